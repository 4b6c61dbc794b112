"""The table of ArviZ's functions in the documentation, made anew by calling them all."""

import warnings

import matplotlib
import pyro
import pytest
import torch

from tests.diagnostics.arviz import functions
from tests.helpers.pages import shortened

pytestmark = pytest.mark.skipif(not functions.ARE_INSTALLED, reason="the versions of the extra arviz are not installed")


@pytest.fixture(scope="module")
def trees():
    matplotlib.use("agg")
    pyro.clear_param_store()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        return functions.make_trees(shortened)


def test_every_function_has_a_call():
    installed = set(functions.public_functions())
    assert installed <= set(functions.CALLS)
    assert set(functions.CALLS) - installed <= functions.NEW


def test_the_table_is_that_of_the_calls(trees):
    _, _, committed = functions.PAGE.read_text("utf-8").partition(functions.HEADING)
    installed = functions.public_functions()
    rows = {name: functions.row(name, trees) for name in functions.CALLS if name in installed}
    names = list(functions.CALLS)
    lines = committed.splitlines()[2:]
    assert committed == functions.table(lines)
    assert [line.split("`")[1] for line in lines] == names
    differ = {name: (line, rows[name]) for name, line in zip(names, lines, strict=True) if name in rows and line != rows[name]}
    assert not differ, "run python -m tests.diagnostics.arviz.functions"


def test_a_wrong_row_is_found(trees):
    """The calls are really made: one that fails, and one that should fail but does not, raise."""
    calls = functions.CALLS
    name, works = "az.loo", calls["az.loo"]
    try:
        calls[name] = "az.loo(tree.prior)"
        with pytest.raises(Exception, match=r"log likelihood|log_likelihood"):
            functions.row(name, trees)
        calls[name] = functions.NotApplicable(works, "never", "nothing")
        with pytest.raises(AssertionError, match=r"expected az\.loo"):
            functions.row(name, trees)
    finally:
        calls[name] = works
