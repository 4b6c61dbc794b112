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


class App:
    """The attributes of Sphinx that the extension reads."""

    class builder:
        format = "html"

    class config:
        notebook_pages = ("page", "quickstart")
        run_notebooks = False
        notebooks_on_github = ""

    def __init__(self, outdir):
        self.outdir = outdir


def test_pages_have_a_link_to_their_notebook(notebooks, tmp_path):
    source = ["# A title\n\n# A comment\n"]
    notebooks.write_notebook(App(tmp_path), "other", source)
    assert source == ["# A title\n\n# A comment\n"]
    notebooks.write_notebook(App(tmp_path), "page", source)
    assert source[0].startswith('# A title\n\n<a href="notebooks/page.ipynb" download>')
    assert source[0].count("<a ") == 1


def test_pages_have_links_to_colab_where_notebooks_are_published(notebooks, tmp_path, monkeypatch):
    monkeypatch.setattr(App.config, "notebooks_on_github", "owner/repository/blob/pages/notebooks")
    source = ["# A title\n\n# A comment\n"]
    notebooks.write_notebook(App(tmp_path), "page", source)
    address = "https://colab.research.google.com/github/owner/repository/blob/pages/notebooks/page.ipynb"
    assert f'<a href="{address}">open in Colab</a>' in source[0].splitlines()[2]


def test_cells_run_from_top_to_bottom(notebooks, tmp_path):
    plot = "import matplotlib.pyplot as plt\n\nprint(a + 1)\nax = plt.figure().add_subplot()"
    text = f"# A\n\n```python\na = 1\n```\n\nText\n\n```python\n{plot}\n```\nEnd\n"
    notebook = notebooks.to_notebook(text)
    notebooks.run(notebook)
    (cell,) = [cell for cell in notebook.cells if "print" in cell.source]
    assert cell.outputs[0].text == "2\n"
    page = notebooks.with_outputs(text, notebook, tmp_path, "page")
    picture = f'\n\n<img src="{tmp_path.name}/page-0.png" alt="picture made by the code above">\n\nEnd'
    assert page == text.replace("\nEnd", picture)
    assert (tmp_path / "page-0.png").read_bytes().startswith(b"\x89PNG")
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


def test_a_page_is_written_as_a_notebook(notebooks, tmp_path):
    notebooks.write_notebook(App(tmp_path), "quickstart", [(DOCS / "quickstart.md").read_text("utf-8")])
    content = json.loads((tmp_path / "notebooks" / "quickstart.ipynb").read_text("utf-8"))
    assert content["nbformat"] == 4
    assert sum(cell["cell_type"] == "code" for cell in content["cells"]) == 16
