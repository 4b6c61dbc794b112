"""The benchmark of schedules: every set is fitted, and schedules differ in their learning rates alone."""

import math
import os

import pytest

from benchmarks.tasks import schedules

NEEDS_DATA = ("oil flow, mean field", "eeg, GP-VAE")


@pytest.mark.parametrize("name", schedules.TASKS)
def test_schedules_start_alike_and_end_apart(name: str, monkeypatch: pytest.MonkeyPatch):
    if name in NEEDS_DATA and not os.environ.get("PYRO_LVGP_DATA"):
        pytest.skip("PYRO_LVGP_DATA names no folder")
    monkeypatch.setattr(schedules, "NUM_DRAWS", 2)

    def bound(schedule: str, num_steps: int) -> float:
        scores = schedules.measure(name, schedule, seed=0, num_steps=num_steps)
        assert list(scores) == ["bound [nats/entry]"]
        return scores["bound [nats/entry]"]

    constant, cosine = bound("constant", 3), bound("cosine", 3)
    assert math.isfinite(constant)
    assert constant != cosine
    assert bound("constant", 1) == bound("cosine", 1)  # the first step has the full rate
    assert bound("cosine", 1) != bound("cosine from 0.02", 1)
