"""Steps with and without compilation are both taken, and timed."""

import math
import os

import pytest

pytest.importorskip("gpytorch")

from benchmarks.tasks import compiled
from benchmarks.tasks.oilflow import standardised
from pyro_lvgp.infer import _compiled_loop


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr(compiled, "standardised", lambda: standardised()[:80])
    monkeypatch.setattr(compiled, "BATCH_SIZE", 40)


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data sets")
# Annealed guides are timed below.
@pytest.mark.parametrize("name", [name for name in compiled.CASES if "annealed" not in name])
def test_both_are_timed(name):
    measured = compiled.measure(name, num_steps=4, block=2, seed=0, backend="eager")
    values = {measurement.metric: measurement.value for measurement in measured}
    assert len(values) == 5
    assert min(values.values()) > 0.0
    assert values["ratio"] == pytest.approx(values["step [ms]"] / values["compiled [ms]"])
    assert math.isinf(values["pays after [steps]"]) == (values["ratio"] <= 1.0)


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data sets")
def test_chains_are_timed(monkeypatch):
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph)
    measured = compiled.measure_chain(2, num_steps=4, block=2, seed=0, backend="eager")
    values = {measurement.metric: measurement.value for measurement in measured}
    assert len(values) == 7
    assert min(values.values()) > 0.0


def test_both_start_from_one_start_and_move():
    contestants = compiled.contestants(compiled.users_own, seed=0, backend="eager")
    for contestant in contestants:
        contestant.train(1, seed=0)  # the first step is not compiled
    weights = [contestant.guide.locs.W for contestant in contestants]
    assert weights[0].equal(weights[1])
    assert weights[0].abs().max() > 0.0
