"""The weather benchmark: what is hidden stays hidden, the peer is the textbook's, every method runs."""

import gzip
import math
import os
from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from tests.helpers import upstream_files

pytest.importorskip("gpytorch")

from benchmarks.core.report import aggregate
from benchmarks.peers.gpytorch_processes import GroupedProcess
from benchmarks.tasks import weather, weather_years
from benchmarks.tasks.weather_data import TRENTINO, load
from pyro_lvgp.models import Prediction

SEEN, UNSEEN = TRENTINO.seen, TRENTINO.unseen
MAXIMUM, MINIMUM = TRENTINO.column("TMAX"), TRENTINO.column("TMIN")
needs_data = pytest.mark.skipif(not os.environ.get("PYRO_LVGP_DATA"), reason="PYRO_LVGP_DATA names no folder")


def test_peer_is_the_closed_form():
    """Group by group, whatever is missing."""
    x, y = torch.rand(6, 2, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    y[0, 2:] = torch.nan
    y[2] = torch.nan
    process = GroupedProcess(x, y)
    process.fit(y, 2, seed=0)
    mean, stddev = process.predict(y[:2])
    kernel, noise = process.model.covar_module, process.model.likelihood.noise.detach()
    K = kernel(x).to_dense().detach()
    for row, got_mean, got_stddev in zip(y, mean, stddev, strict=False):
        seen = ~torch.isnan(row)
        gain = K[:, seen] @ torch.linalg.inv(K[seen][:, seen] + noise * torch.eye(int(seen.sum())))
        torch.testing.assert_close(got_mean, gain @ row[seen])
        torch.testing.assert_close(got_stddev.square(), (K - gain @ K[seen]).diagonal() + noise)


@needs_data
@pytest.mark.parametrize("days", [3, 7])
def test_groups_hide_what_is_to_be_predicted(days):
    data = load(days)
    for name, num_years in ((SEEN, 2), (UNSEEN, 1)):
        part, y = data.parts[name], data.data(name)
        assert y.shape == (num_years * (365 // days), len(data.x), 3) == part.truth.shape
        assert torch.isnan(y[part.hidden]).all()
        torch.testing.assert_close(
            part.centre + data.scale * y, part.truth.masked_fill(part.hidden, torch.nan), equal_nan=True
        )
        hidden = part.hidden.unflatten(1, (days, -1))
        if days == 3:
            assert hidden[:, 1, :, MAXIMUM].all()
            assert hidden.double().mean() == pytest.approx(1 / 9)
        else:
            assert torch.equal(hidden[..., MAXIMUM], hidden[..., MINIMUM])
            assert hidden[..., MAXIMUM].double().mean() == pytest.approx(0.1, abs=0.01)
    standardised = data.train
    torch.testing.assert_close(standardised.square().flatten(0, 1).nanmean(0), torch.ones(3, dtype=torch.float64))
    assert standardised.flatten(0, 1).nanmean(0).abs().max() < 1e-6


@needs_data
@pytest.mark.parametrize(("days", "validation", "variables"), [(3, "minima", [2]), (3, "maxima", [1]), (7, "pairs", [1, 2])])
def test_validation_shows_nothing_of_what_is_tested(days, validation, variables):
    tested, validated = (load(days, validation=kind).parts for kind in (None, validation))
    assert set(validated) == {SEEN}
    test, part = tested[SEEN], validated[SEEN]
    assert torch.isnan(part.truth[test.hidden]).all()
    torch.testing.assert_close(part.truth, test.truth.masked_fill(test.hidden, torch.nan), equal_nan=True)
    wanted = (part.hidden & ~torch.isnan(part.truth)).flatten(0, 1).any(0)
    assert wanted.nonzero().flatten().tolist() == variables


def test_scores_of_known_predictions():
    truth = torch.tensor([3.0, torch.nan, -1.0])  # of which one was never measured
    values = weather.scores(UNSEEN, truth, truth.nan_to_num() + 2.0, torch.tensor(4.0))
    assert values[f"RMSE {UNSEEN} [°C]"] == pytest.approx(2.0)
    assert values[f"NLL {UNSEEN}"] == pytest.approx(0.5 * math.log(2.0 * math.pi * 16.0) + 0.125)


def use_few_groups(monkeypatch, benchmark):
    """Have a benchmark load the first groups of each part alone, two seen and one unseen, and draw two samples."""

    def load_few(days, *, validation=None, source):
        data = load(days, validation=validation, source=source)
        numbers = {source.seen: 2, source.unseen: 1}
        few = {name: type(part)(*(field[: numbers[name]] for field in part)) for name, part in data.parts.items()}
        return replace(data, parts=few)

    monkeypatch.setattr(benchmark, "load", load_few)
    monkeypatch.setattr(weather, "NUM_SAMPLES", 2)


@needs_data
@pytest.mark.parametrize("task", ["three days", "weeks"])
def test_every_method_runs(task, monkeypatch):
    use_few_groups(monkeypatch, weather)
    measured = list(weather.run(quick=True, seeds=1, only=task))
    assert {m.method for m in measured} == {*weather.PEERS, *weather.TASKS[task]}
    assert all(math.isfinite(m.value) for m in measured)
    mean_rmse = {m.method: m.value for m in measured if m.metric == f"RMSE {SEEN} [°C]"}
    assert mean_rmse["season and elevation"] < mean_rmse["mean of the training years"]


@needs_data
def test_periods_are_averaged_and_compared_with_the_reference(monkeypatch):
    """Thirty years, of which each is predicted, and all predictions count as much."""
    years = [year for source in weather_years.PERIODS for year in (*source.train_years, *source.unseen_years)]
    assert years == list(range(1978, 2008))
    use_few_groups(monkeypatch, weather_years)
    monkeypatch.setattr(weather_years, "PERIODS", weather_years.PERIODS[::6])
    monkeypatch.setitem(weather_years.TASKS, "three days", {"GP-VAE": weather.Method(linear=True)})
    measured = list(weather_years.run(quick=True, seeds=2, only="three days"))
    rows = {(row.dataset, row.method, row.metric): row for row in aggregate(measured)}
    periods = ["three days, 1978 and 1979, and 1980 unseen", "three days, 1996 and 1997, and 1998 unseen"]
    together, compared = "three days, all periods", f"three days, less {weather_years.REFERENCE}"
    assert {dataset for dataset, _, _ in rows} == {*periods, together, compared}
    for metric in ("RMSE seen [°C]", "NLL seen", "RMSE unseen [°C]", "NLL unseen"):
        ours, theirs = ([rows[p, name, metric].mean for p in periods] for name in ("GP-VAE", weather_years.REFERENCE))
        assert rows[together, "GP-VAE", metric].mean == pytest.approx(np.mean(ours))
        difference = rows[compared, "GP-VAE", metric]
        assert difference.mean == pytest.approx(np.subtract(ours, theirs).mean())
        assert difference.sd == pytest.approx(np.subtract(ours, theirs).std(ddof=1))
        assert difference.seeds == len(periods)


JAPANESE = ("JA000047401", "JA000047662", "JA000047759", "JA000047807")
TENTHS = {"PRCP", "TMAX", "TMIN", "TAVG"}  # the unit of these in the files


@pytest.fixture
def japan(tmp_path, monkeypatch):
    """Two years at four stations in the published format, on a server: a wave over the year, and the station's number."""
    days = np.arange("1980-01-01", "1982-01-01", dtype="datetime64[D]")
    wave = 10.0 - 10.0 * np.cos(2.0 * np.pi * np.arange(len(days)) / 365.25)
    with upstream_files.ghcn(monkeypatch, tmp_path) as upstream:
        stations = [f"{name}  {35 + k}.0000  {136 + k}.0000  {100.0 * k:5.1f}    STATION" for k, name in enumerate(JAPANESE)]
        upstream.files["/ghcnd-stations.txt"] = "\n".join(stations).encode()
        for k, name in enumerate(JAPANESE):
            values = {"PRCP": 5 * k + wave, "TMAX": wave + k + 5, "TMIN": wave + k - 5, "TAVG": wave + k, "SNWD": 20 - wave}
            lines = [
                f"{name},{str(day).replace('-', '')},{variable},{round(value * (10 if variable in TENTHS else 1))},,,S,"
                for variable, column in values.items()
                for day, value in zip(days, column, strict=True)
            ]
            upstream.files[f"/by_station/{name}.csv.gz"] = gzip.compress("\n".join(lines).encode())
        yield wave


@pytest.mark.parametrize(("task", "days"), [("three days, Japan", 3), ("weeks, Japan", 7)])
def test_the_thesis_s_own_stations_by_the_same_command(japan, task, days, monkeypatch):
    data = load(days, source=weather.SOURCES[task])
    part = data.parts["1981"]
    assert part.truth.shape == (365 // days, days * len(JAPANESE), 5)
    first = torch.as_tensor([japan[366] + k for k in range(4)])  # the year before had a day more
    torch.testing.assert_close(part.truth[0, :4, 3], first, atol=0.06, rtol=0.0)
    torch.testing.assert_close(
        part.truth[0, :4, 0], (5.0 * torch.arange(4).double() + japan[366]).log1p(), atol=0.01, rtol=0.0
    )
    shown = torch.isnan(data.data("1981")).unflatten(1, (days, -1))
    hidden = {column for column in range(5) if shown[..., column].any()}
    assert hidden == ({3} if days == 3 else {1, 2, 3})
    assert (days == 7) or shown[:, 1, :, 3].all()
    use_few_groups(monkeypatch, weather)
    monkeypatch.setitem(weather.TASKS, task, {"GP-VAE": weather.Method()})
    measured = list(weather.run(quick=True, seeds=1, only=task))
    assert {m.method for m in measured} == {*weather.PEERS, "GP-VAE"}
    assert {m.metric for m in measured} >= {"RMSE 1980 [°C]", "NLL 1981"}
    assert all(math.isfinite(m.value) for m in measured)


@needs_data
def test_grid_runs_alone(monkeypatch):
    use_few_groups(monkeypatch, weather)
    asked = []

    def predictions(weather, method, *, seed, epochs):
        asked.append(method)
        truths = {name: part.truth[part.hidden].nan_to_num() for name, part in weather.parts.items()}
        return {name: Prediction((dist.Normal(truth[None, :, None], 1.0),)) for name, truth in truths.items()}, 1.0

    monkeypatch.setattr(weather, "predictions", predictions)
    measured = list(weather.run(quick=True, seeds=1, only="grid"))
    assert {m.method for m in measured} == set(weather.GRID)
    assert asked == list(weather.GRID.values())


@needs_data
def test_fits_together_are_scored_as_their_mixture(monkeypatch):
    """Two fits, a degree above and below the truth."""
    use_few_groups(monkeypatch, weather)
    monkeypatch.setattr(weather, "PEERS", {})
    monkeypatch.setitem(weather.TASKS, "three days", {"GP-VAE": weather.Method()})

    def predictions(weather, method, *, seed, epochs):
        off = 1.0 if seed else -1.0
        standardised = {name: (part.truth - part.centre + off) / weather.scale for name, part in weather.parts.items()}
        return {
            name: Prediction((dist.Normal(means[weather.parts[name].hidden][None, :, None].nan_to_num(), 1e-3),))
            for name, means in standardised.items()
        }, 2.0

    monkeypatch.setattr(weather, "predictions", predictions)
    measured = list(weather.run(quick=True, seeds=2, only="three days"))
    alone, together = (
        [m for m in measured if m.method == name and m.metric == f"RMSE {UNSEEN} [°C]"]
        for name in ("GP-VAE", "GP-VAE, 2 fits together")
    )
    assert [m.value for m in alone] == pytest.approx([1.0, 1.0])
    assert [m.value for m in together] == pytest.approx([0.0], abs=1e-9)
    assert together[0].seconds == 4.0
