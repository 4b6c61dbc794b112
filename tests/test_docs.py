"""The Python blocks of every page run in order, in one namespace a page, and print what the page says they print."""

import contextlib
import importlib
import io
import os
import re
from pathlib import Path

import matplotlib
import pyro
import pytest
from matplotlib import pyplot as plt

from pyro_lvgp.sklearn import gplvm_imputer
from tests.diagnostics.arviz import functions
from tests.helpers.pages import BLOCK, shortened

ROOT = Path(__file__).parent.parent
NEEDS_DATA = {"datasets.md": "oilflow"}
NEEDS_PACKAGE = {"single_cells.md": "anndata"}
# The S of "S. " is to reStructuredText the number of a list with nothing in it.
ENUMERATOR = re.compile(r":(?:param|returns|raises)[^:\n]*: *(?:[A-Za-z#]|[ivxlcdm]+|[IVXLCDM]+|\d+)[.)]\s")


def pages():
    """Pages with Python blocks, by their path in the repository."""
    paths = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")}
    if functions.ARE_INSTALLED:
        paths.remove(functions.PAGE)  # whose test runs its blocks
    return [
        path.relative_to(ROOT).as_posix() for path in sorted(paths) if path.exists() and BLOCK.search(path.read_text("utf-8"))
    ]


@pytest.fixture(autouse=True)
def _own_process(tmp_path, monkeypatch):
    """What a page may change stays in its test: files, Pyro's settings, figures."""
    monkeypatch.chdir(tmp_path)
    for name in ("_MAX_FOLDS", "_ALL_FOLDS"):  # of estimators, as few as steps
        monkeypatch.setattr(gplvm_imputer, name, 1)
    monkeypatch.setattr(importlib.import_module("pyro_lvgp.diagnostics.report"), "_NUM_LOO_DRAWS", 25)
    # What torchrun sets for one process; port 0 is any that is free.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    matplotlib.use("agg")
    with pyro.settings.context(module_local_params=False), pyro.validation_enabled(True):
        yield
    plt.close("all")


@pytest.mark.parametrize("page", pages())
def test_page_runs(page):
    if Path(page).name in NEEDS_DATA and not os.environ.get("PYRO_LVGP_DATA"):
        pytest.skip("PYRO_LVGP_DATA names no folder")
    if package := NEEDS_PACKAGE.get(Path(page).name):
        pytest.importorskip(package)
    text = (ROOT / page).read_text("utf-8")
    namespace = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        first_line = text.count("\n", 0, block.start("code"))
        # Blank lines in front make a traceback show the line of the page.
        code = compile("\n" * first_line + shortened(block["code"]), page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            exec(code, namespace)
        if block["output"] is not None:
            assert printed.getvalue() == block["output"], f"{page}, block at line {first_line}"


def test_no_description_is_an_empty_list():
    paths = (ROOT / "pyro_lvgp").rglob("*.py")
    found = {path.name: ENUMERATOR.findall(path.read_text("utf-8")) for path in paths}
    assert not {name: lines for name, lines in found.items() if lines}


def test_the_gallery_has_all_pictures():
    text = (ROOT / "docs" / "gallery.md").read_text("utf-8")
    assert set(re.findall(r"\(images/(\S+)\)", text)) == {path.name for path in (ROOT / "docs" / "images").iterdir()}


def test_every_promise_names_a_test_that_exists():
    named = re.findall(r"`(tests/[^`]*)`", (ROOT / "docs" / "promises.md").read_text("utf-8"))
    assert len(named) > 10
    for name in named:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text("utf-8") if function else (ROOT / path).is_file(), name


def texts():
    """The text of the README and of every page."""
    return [path.read_text("utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]


def test_every_file_of_results_that_a_page_names_exists():
    named = {name for page in texts() for name in re.findall(r"benchmarks/results/[\w*]+(?:\.\w+)?", page)}
    assert len(named) > 50
    assert not {name for name in named if not any(ROOT.glob(name))}


def test_numbers_come_from_commands():
    for page in texts():
        assert not re.search(r"\(by hand|by hand[,;:)]", " ".join(page.split()))
