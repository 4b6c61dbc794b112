"""Sphinx extension that writes pages as notebooks, from the same Markdown files, beside the built pages."""

import re
from pathlib import Path

import jupytext

PAGES = ("quickstart",)
ROLE = re.compile(r"\{py:\w+\}`~?(?:[^`<]*<)?[\w.]*?(\w+)>?`")
LINK = re.compile(r"\]\((\w+)\.md(#[^)]*)?\)")


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
    return notebook


def write_notebooks(app, error):
    """Write the notebooks after a build; called by Sphinx."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir, "notebooks")
        folder.mkdir(exist_ok=True)
        for name in PAGES:
            notebook = to_notebook(Path(app.srcdir, f"{name}.md").read_text("utf-8"))
            jupytext.write(notebook, folder / f"{name}.ipynb", fmt="ipynb")


def setup(app):
    """Called by Sphinx."""
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True}
