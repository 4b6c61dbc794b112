"""A brief recording, and the comparison of its tenths."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.tasks import soak


def test_a_recording_of_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "NUM_STEPS", 2)
    monkeypatch.setattr(soak, "NUM_PARTS", 3)
    rows = list(soak.run(quick=True, seeds=1, minutes=0.0, picture=tmp_path / "soak.png"))
    values = {(row.method, row.metric): row.value for row in rows}
    assert rows[0].settings["rounds"] == 3
    assert 100.0 < values["memory [MB]", "first tenth"] < 1e5
    assert values["memory [MB]", "ratio"] == pytest.approx(
        values["memory [MB]", "last tenth"] / values["memory [MB]", "first tenth"], rel=1e-6
    )
    assert values["steps per CPU second", "last tenth"] > 0.0
    assert (tmp_path / "soak.png").read_bytes()[:4] == b"\x89PNG"


def test_a_slope_within_its_error() -> None:
    random = np.random.default_rng(0)
    hours = np.linspace(0.0, 1.0, 500)
    found = [soak.summarise(list(hours), list(50.0 + 3.0 * hours + random.normal(size=500))) for _ in range(40)]
    z = [(each["slope [1/h]"] - 3.0) / each["standard error"] for each in found]
    assert abs(np.mean(z)) < 0.6
    assert 0.7 < np.std(z) < 1.7
