"""Pages of the documentation as notebooks."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def notebooks():
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "extensions" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cells_of_code_are_the_blocks_of_the_page(notebooks):
    names = notebooks.pages(DOCS)
    assert {"quickstart", "annealing", "gp_vae"} <= set(names)
    for name in names:
        text = (DOCS / f"{name}.md").read_text("utf-8")
        cells = notebooks.to_notebook(text).cells
        assert [cell.source for cell in cells if cell.cell_type == "code"] == BLOCK.findall(text)


def test_pages_have_a_link_to_their_notebook(notebooks):
    class App:
        class config:
            notebook_pages = ("page",)

    source = ["# A title\n\n# A comment\n"]
    notebooks.link_notebooks(App, "other", source)
    assert source == ["# A title\n\n# A comment\n"]
    notebooks.link_notebooks(App, "page", source)
    assert source[0].startswith('# A title\n\n<a href="notebooks/page.ipynb" download>')
    assert source[0].count("<a ") == 1


def test_cells_run_from_top_to_bottom(notebooks, tmp_path):
    notebook = notebooks.to_notebook("# A\n\n```python\na = 1\n```\n\nText\n\n```python\nprint(a + 1)\n```\n")
    notebooks.run(notebook)
    assert notebook.cells[-1].outputs[0].text == "2\n"
    failing = notebooks.to_notebook("```python\nraise ValueError('a reason')\n```\n")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="a reason"):
        notebooks.run(failing)


def test_the_text_has_neither_roles_nor_links_to_sources(notebooks):
    text = (DOCS / "quickstart.md").read_text("utf-8")
    prose = "\n".join(cell.source for cell in notebooks.to_notebook(text).cells if cell.cell_type == "markdown")
    assert "{py:" in text
    assert "{py:" not in prose
    assert ".md)" not in prose
    assert ".md#" not in prose
    assert "```sh\npip install -e ." in prose


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("{py:class}`~pyro_lvgp.sklearn.GPLVM`", "`GPLVM`"),
        ("{py:func}`pyro_lvgp.diagnostics.loo`", "`loo`"),
        ("{py:meth}`LinearGPVAE.fit <pyro_lvgp.models.LinearGPVAE.fit>`", "`fit`"),
        ("[a](b.md), [c](d_e.md#f-g)", "[a](../b.html), [c](../d_e.html#f-g)"),
    ],
)
def test_roles_become_names(notebooks, role, name):
    (cell,) = notebooks.to_notebook(role).cells
    assert cell.source == name


def test_notebooks_are_written_after_a_build(notebooks, tmp_path):
    class App:
        srcdir, outdir = DOCS, tmp_path

        class builder:
            format = "html"

        class config:
            notebook_pages, run_notebooks = ("quickstart",), False

    notebooks.write_notebooks(App, None)
    content = json.loads((tmp_path / "notebooks" / "quickstart.ipynb").read_text("utf-8"))
    assert content["nbformat"] == 4
    assert sum(cell["cell_type"] == "code" for cell in content["cells"]) == 15
