"""Sphinx extension that writes pages with Python code as notebooks, from the same Markdown files, beside the built pages."""

import logging
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext

logger = logging.getLogger("sphinx.notebooks")
ROLE = re.compile(r"\{py:\w+\}`~?(?:[^`<]*<)?[\w.]*?(\w+)>?`")
LINK = re.compile(r"\]\((\w+)\.md(#[^)]*)?\)")
TITLE = re.compile(r"\A# .*\n")
CODE = re.compile(r"^```python$", re.MULTILINE)
_EXCEPT = ("distributed", "index")  # a script for torchrun, and the front page


def pages(folder):
    """Names of the pages with Python code, of which there are notebooks."""
    names = {path.stem for path in Path(folder).glob("*.md") if CODE.search(path.read_text("utf-8"))}
    return sorted(names.difference(_EXCEPT))


def to_notebook(text: str):
    """Convert a page to a notebook: Python blocks become cells of code, and all other text cells of Markdown.

    Roles of Sphinx become names, and links to other pages links to the built ones.
    """
    notebook = jupytext.reads(text, fmt="md")
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.startswith("%%"):  # a block of another language
            language, _, source = cell.source.removeprefix("%%").partition("\n")
            cell.cell_type, cell.source = "markdown", f"```{language}\n{source}\n```"
            for name in ("execution_count", "outputs"):
                cell.pop(name, None)
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(r"](../\1.html\2)", ROLE.sub(r"`\1`", cell.source))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def run(notebook):
    """Run the cells of a notebook from top to bottom, in an empty folder; it then has their outputs.

    :raises nbclient.exceptions.CellExecutionError: if a cell ends with an error.
    """
    from nbclient import NotebookClient

    with TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}}).execute()


def link_notebooks(app, docname, source):
    """Put a link to the notebook below the title of a page; called by Sphinx."""
    if docname in app.config.notebook_pages:
        link = f'<a href="notebooks/{docname}.ipynb" download>This page as a notebook</a>'
        source[0] = TITLE.sub(lambda title: f"{title[0]}\n{link}\n", source[0])


def write_notebooks(app, error):
    """Write the notebooks after a build; called by Sphinx."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir, "notebooks")
        folder.mkdir(exist_ok=True)
        for name in app.config.notebook_pages:
            notebook = to_notebook(Path(app.srcdir, f"{name}.md").read_text("utf-8"))
            if app.config.run_notebooks:
                logger.info(f"running notebook {name}")
                run(notebook)
            jupytext.write(notebook, folder / f"{name}.ipynb", fmt="ipynb")


def find_pages(app, config):
    """Find the pages of which there are notebooks; called by Sphinx."""
    config.notebook_pages = pages(app.srcdir)


def setup(app):
    """Called by Sphinx."""
    app.add_config_value("notebook_pages", [], "env")
    app.add_config_value("run_notebooks", False, "", bool)
    app.connect("config-inited", find_pages)
    app.connect("source-read", link_notebooks)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True}
