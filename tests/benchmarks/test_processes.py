"""The benchmark of processes at a few steps."""

import os

import pytest

pytest.importorskip("gpytorch")

from benchmarks.tasks import processes


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data sets")
def test_two_processes_share_the_rows_of_a_step():
    alone, shared = (
        processes.fitted(processes.SETUPS[name], "oil flow, IW, S = 20", num_steps=3, seed=0)
        for name in ("1 process", "2 processes")
    )
    assert len(alone.losses) == len(shared.losses) == 3
    assert shared.losses != alone.losses  # with draws of their own
    assert shared.losses == pytest.approx(alone.losses, rel=0.02)
