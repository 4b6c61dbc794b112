"""Sphinx extension that writes pages with Python code as notebooks, from the same Markdown files, beside the built pages.

With ``run_notebooks`` the notebooks are run, and their pictures are put on the pages.  With ``notebooks_on_github``, the
folder ``owner/repository/blob/branch/path`` of published notebooks, pages have links that open them in Colab.
"""

import logging
import re
from base64 import b64decode
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext

logger = logging.getLogger("sphinx.notebooks")
ROLE = re.compile(r"\{py:\w+\}`~?(?:[^`<]*<)?[\w.]*?(\w+)>?`")
LINK = re.compile(r"\]\((\w+)\.md(#[^)]*)?\)")
TITLE = re.compile(r"\A# .*\n")
CODE = re.compile(r"^```python$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n.*?\n```$", re.DOTALL | re.MULTILINE)
COLAB = "https://colab.research.google.com/github"
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


def with_outputs(text: str, notebook, folder: Path, name: str) -> str:
    """Put the pictures of a notebook that was run below the blocks of its page, and write them to a folder.

    Texts that are printed stand on the pages already, and are compared with what is printed by the tests.
    """
    cells = iter([cell for cell in notebook.cells if cell.cell_type == "code"])
    number = count()

    def with_pictures(block):
        pictures = [output.data["image/png"] for output in next(cells).outputs if "image/png" in output.get("data", {})]
        lines = [block[0]]
        for picture in pictures:
            path = folder / f"{name}-{next(number)}.png"
            path.write_bytes(b64decode(picture))
            lines.append(f'\n<img src="{folder.name}/{path.name}" alt="picture made by the code above">\n')
        return "\n".join(lines)

    return BLOCK.sub(with_pictures, text)


def write_notebook(app, docname, source):
    """Write the notebook of a page, and put a link to it below the title; called by Sphinx when it reads a page."""
    if docname not in app.config.notebook_pages or app.builder.format != "html":
        return
    folder = Path(app.outdir, "notebooks")
    folder.mkdir(parents=True, exist_ok=True)
    notebook, text = to_notebook(source[0]), source[0]
    if app.config.run_notebooks:
        logger.info(f"running notebook {docname}")
        run(notebook)
        text = with_outputs(text, notebook, folder, docname)
    jupytext.write(notebook, folder / f"{docname}.ipynb", fmt="ipynb")
    links = [f'<a href="{folder.name}/{docname}.ipynb" download>This page as a notebook</a>']
    if published := app.config.notebooks_on_github:
        links.append(f'<a href="{COLAB}/{published}/{docname}.ipynb">open in Colab</a>')
    source[0] = TITLE.sub(lambda title: f"{title[0]}\n{', '.join(links)}\n", text)


def find_pages(app, config):
    """Find the pages of which there are notebooks; called by Sphinx."""
    config.notebook_pages = pages(app.srcdir)


def setup(app):
    """Called by Sphinx."""
    app.add_config_value("notebook_pages", [], "env")
    app.add_config_value("run_notebooks", False, "env", bool)
    app.add_config_value("notebooks_on_github", "", "env", str)
    app.connect("config-inited", find_pages)
    app.connect("source-read", write_notebook)
    return {"parallel_read_safe": True}
