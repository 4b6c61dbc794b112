"""Benchmark and tutorial of long series, at sizes that take a moment."""

import os

import matplotlib.pyplot as plt
import pytest
import torch

from benchmarks.core.report import aggregate
from benchmarks.tasks import longseries
from benchmarks.tasks.longseries import BOUND, MEMORY, SECONDS, PeakMemory
from tutorials import long_series

needs_data = pytest.mark.skipif(
    "PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with weather_trentino.npz"
)


def test_peak_memory_is_that_of_tensors_alive_at_once():
    before = torch.ones(1000)
    with PeakMemory() as memory:
        x = before.exp()
        x = x.exp()  # two of them at once
        assert memory.peak == 8000
        del x
        x = torch.ones(10, 100).T[:5].reshape(-1)  # a view counts once, its copy by itself
        assert memory.peak == 8000
        y = torch.ones(1500, requires_grad=True)
        assert memory.peak == 8000
        (y.exp() + x.sum()).sum().backward()
    assert 14_000 < memory.peak < 40_000
    assert before.sum() == 1000.0


def test_all_methods_are_measured(monkeypatch):
    for name, task in longseries.TASKS.items():
        monkeypatch.setitem(longseries.TASKS, name, task._replace(quick_sizes=(250, 350, 500)))
    rows = aggregate(longseries.run(quick=True, seeds=1))
    values = {(row.method, row.metric): row.mean for row in rows}
    for num in (250, 350, 500):
        dense, state_space = (values[f"{method}, N = {num:,}", BOUND] for method in ("dense", "state-space"))
        assert state_space == pytest.approx(dense, rel=1e-6)
        assert values[f"sparse, N = {num:,}", SECONDS] > 0.0
        assert values[f"state-space, N = {num:,}", MEMORY] < values[f"dense, N = {num:,}", MEMORY]
    assert values["dense", f"exponent of {MEMORY}"] == pytest.approx(2.0, abs=0.1)
    assert values["state-space", f"exponent of {MEMORY}"] == pytest.approx(1.0, abs=0.1)


def test_one_method_alone(monkeypatch):
    task = longseries.TASKS["dense"]
    monkeypatch.setitem(longseries.TASKS, "dense", task._replace(quick_sizes=(20, 30, 40)))
    assert {row.method.split(",")[0] for row in longseries.run(quick=True, seeds=1, only="dense")} == {"dense"}


@needs_data
def test_the_tutorial(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(long_series, "NUM_GAPS", 10)
    monkeypatch.setattr("sys.argv", ["long_series", "--steps", "3", "--days", "400", "--out", str(tmp_path)])
    long_series.main()
    plt.close("all")
    assert {path.name for path in tmp_path.iterdir()} == {"gap.png", "seconds.png"}
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    out = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert rows == [
        "hidden days",
        "yearly cycle",
        "straight lines",
        "GP-VAE",
        "five warm days",
        "observed",
        "marginals",
        "joint",
    ]
    assert "400 days, 3 steps" in out


@needs_data
def test_the_tutorial_s_gaps_and_rivals(monkeypatch):
    monkeypatch.setattr(long_series, "NUM_GAPS", 10)
    data = long_series.load(400)
    assert data.shown.isnan().equal(data.hidden | data.Y.isnan())
    assert 8 * 5 * 5 < data.hidden.sum() <= 8 * 5 * 10
    columns = data.shown[~data.shown[:, 0].isnan(), 0]
    assert columns.square().mean().sqrt() == pytest.approx(1.0)
    lines = long_series.from_lines(data)
    seen = ~data.shown.isnan()
    torch.testing.assert_close(lines.mean[seen], data.Y[seen])
    anomalies = (lines.mean - data.cycle) / data.scale
    bend = anomalies[2:] - 2.0 * anomalies[1:-1] + anomalies[:-2]
    inside = ~(seen[2:] | seen[1:-1] | seen[:-2])
    assert bend[inside].abs().max() < 1e-9
    warm = long_series.all_warm(data.cycle + 1.0, data)
    assert warm.shape == (10, 8)
    assert warm.all()
    cold = data.cycle + 1.0
    cold[data.gaps[3] + 2, 6] -= 2.0
    assert not long_series.all_warm(torch.stack([cold, cold]), data)[:, 3, 6].any()
