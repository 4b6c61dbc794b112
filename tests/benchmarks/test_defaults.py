"""Peers of the benchmark of defaults against dense conditional distributions, its splits and scores, and a quick run."""

import os
import pkgutil

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from benchmarks.core.arrays import load_statsmodels
from benchmarks.core.report import Measurement, aggregate
from benchmarks.peers import series_imputers
from benchmarks.peers.table_imputers import PEERS, _em_step, given, random_tenth
from benchmarks.tasks import defaults
from benchmarks.tasks.defaults_data import SETS, STATSMODELS, Task, _varies, load_tasks
from benchmarks.tasks.defaults_series import SERIES, hide_blocks, load_series

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def mixture():
    A = torch.randn(2, 3, 3)
    return torch.tensor([0.3, 0.7]), torch.randn(2, 3), A @ A.mT + 0.1 * torch.eye(3)


def test_conditional_distributions_of_a_mixture(mixture):
    """p(y_m | y_o) = p(y_m, y_o) / p(y_o), for one missing entry."""
    weights, means, covariances = mixture
    joint = MixtureSameFamily(Categorical(weights), MultivariateNormal(means, covariances))
    observed = MixtureSameFamily(Categorical(weights), MultivariateNormal(means[:, :2], covariances[:, :2, :2]))
    y = torch.randn(4, 3)
    filled = given(weights, means, covariances, y.masked_fill(torch.arange(3) == 2, torch.nan))
    torch.testing.assert_close(filled.log_prob(y)[:, 2], joint.log_prob(y) - observed.log_prob(y[:, :2]))
    grid = torch.linspace(-40.0, 40.0, 401)
    one = given(weights, means, covariances, torch.tensor([[0.3, -0.2, torch.nan]]))
    density = torch.stack([one.log_prob(torch.full((1, 3), float(x)))[0, 2] for x in grid]).exp()
    torch.testing.assert_close(torch.trapezoid(density * grid, grid), one.mean[0, 2], rtol=1e-3, atol=1e-3)


def test_em_steps_of_a_mixture_do_not_lower_the_likelihood(mixture):
    Y = MixtureSameFamily(Categorical(mixture[0]), MultivariateNormal(*mixture[1:])).sample((200,))
    Y[torch.rand(200, 3) < 0.3] = torch.nan
    Y = Y[~Y.isnan().all(1)]

    def log_likelihood(weights, means, covariances):
        total = 0.0
        for y in Y:
            o = ~y.isnan()
            parts = MultivariateNormal(means[:, o], covariances[:, o][:, :, o])
            total += MixtureSameFamily(Categorical(weights), parts).log_prob(y[o])
        return total

    parts = torch.full((2,), 0.5), torch.randn(2, 3), torch.eye(3).expand(2, 3, 3)
    values = [log_likelihood(*parts)]
    for _ in range(5):
        parts = _em_step(Y, *parts)
        values.append(log_likelihood(*parts))
    assert (torch.stack(values).diff() > -0.1).all()  # the regularisation of covariances may cost a little
    assert values[-1] > values[0] + 10.0


@pytest.mark.parametrize("peer", PEERS)
def test_peers_do_not_see_hidden_entries_and_use_the_others(peer):
    task = load_tasks("iris", 0)["new rows"]
    filled = PEERS[peer](task.train, task.rows, random_tenth(task.train, 0), 0)
    error = (filled.mean - task.truth)[task.hidden]
    assert error.square().mean() < 1.0  # the variance of the columns
    torch.testing.assert_close(filled.mean[~task.hidden], task.truth[~task.hidden], rtol=1e-4, atol=1e-4)


def test_large_tasks_have_all_rows_and_columns_of_smaller_sets():
    tasks = defaults._load("breast cancer", ["large"], 0, quick=False)
    assert tasks.keys() == {"hidden entries, large", "new rows, large"}
    assert {task.train.shape for task in tasks.values()} == {(469, 30)}
    assert tasks["new rows, large"].rows.shape == (100, 30)
    assert not defaults._load("iris", ["large"], 0, quick=False)


def test_splits_hide_what_they_say():
    tasks = load_tasks("wine", 0)
    new, entries = tasks["new rows"], tasks["hidden entries"]
    assert new.hidden.sum(1).eq(6).all()
    assert 0.15 < entries.hidden.double().mean() < 0.25
    assert torch.equal(new.rows.isnan(), new.hidden)
    assert torch.equal(entries.rows.isnan(), entries.hidden)
    torch.testing.assert_close(new.train.square().mean(0), torch.ones(13))


def test_every_table_of_statsmodels_with_enough_rows_and_columns_is_a_set():
    datasets = pytest.importorskip("statsmodels.datasets")
    found = []
    for module in pkgutil.iter_modules(datasets.__path__):
        if module.ispkg and hasattr(datasets, module.name):
            values = load_statsmodels(module.name)
            if len(values) >= 50 and sum(_varies(column) for column in values.T) >= 4:
                found.append(module.name)
    assert tuple(found) == STATSMODELS


@pytest.mark.parametrize("name", SETS)
def test_columns_of_every_table_are_standardised_and_gaps_are_of_observed_entries(name):
    for task in _load_or_skip(load_tasks, name).values():
        _check(task)


@pytest.mark.parametrize("name", SERIES)
def test_columns_of_every_series_are_standardised_and_gaps_are_of_observed_entries(name):
    task = _load_or_skip(load_series, name)
    _check(task)
    assert task.t.diff().gt(0.0).all()
    assert len(task.t) == len(task.train) <= 500
    torch.testing.assert_close(task.truth.nanmean(0), torch.zeros(task.truth.shape[1]), atol=1e-9, rtol=0.0)
    torch.testing.assert_close(task.truth.square().nanmean(0), torch.ones(task.truth.shape[1]))


def _load_or_skip(load, name):
    try:
        return load(name, 0)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


def _check(task):
    assert 4 <= task.truth.shape[1] <= 15
    assert task.truth[task.hidden].isfinite().all()
    assert not task.truth.isinf().any()
    assert torch.equal(task.rows.isnan(), task.hidden | task.truth.isnan())
    assert (~task.train.isnan()).sum(0).gt(10).all()
    assert task.hidden.any(0).all()


@pytest.mark.parametrize(("shape", "fifth"), [((100, 11), 2), ((40, 3), 1)])
def test_hidden_blocks_are_consecutive_and_of_their_lengths(shape, fifth):
    """A fifth of the columns has a block of 20 % of the rows, all have the same one of 5 %, and the two may overlap."""
    rng = np.random.default_rng(0)
    num_rows, num_columns = shape
    for _ in range(50):
        hidden = hide_blocks(*shape, rng)
        common = hidden.all(1).nonzero().squeeze(1)
        assert len(common) >= num_rows // 20
        short = hidden.sum(0) == num_rows // 20
        assert short.sum() == num_columns - fifth
        assert torch.equal(hidden[:, short].all(1), hidden[:, short].any(1))
        for column in hidden.T:
            (edges,) = torch.nn.functional.pad(column.long(), (1, 1)).diff().nonzero(as_tuple=True)
            lengths = (edges[1::2] - edges[::2]).sort().values.tolist()
            assert lengths in ([num_rows // 20], [num_rows // 20, num_rows // 5]) or (
                len(lengths) == 1 and num_rows // 5 <= lengths[0] <= num_rows // 4
            )
        assert (~hidden).any(0).all()


def test_peers_of_series_beat_the_mean_of_a_wave():
    t = torch.arange(100.0)
    truth = 2.0**0.5 * torch.sin(t[:, None] / 10.0 + torch.arange(3))
    hidden = torch.zeros(100, 3, dtype=torch.bool)
    hidden[40:50, 0] = hidden[70:75] = True
    gaps = truth.masked_fill(hidden, torch.nan)
    held_out = hidden.roll(20, 0) & ~hidden
    for peer in series_imputers.PEERS.values():
        filled = peer(t, gaps, held_out, None)
        error = filled.mean - truth
        assert error[hidden].square().mean() < 0.1
        assert error[~hidden].abs().max() < 1e-2
    points = series_imputers.interpolation(t, gaps, held_out, None)
    again = torch.as_tensor(np.interp(t, t[~(hidden | held_out)[:, 1]], truth[~(hidden | held_out)[:, 1], 1]))
    torch.testing.assert_close(points.scale[0, 0, 1], (again - truth[:, 1])[held_out[:, 1]].square().mean().sqrt())


def test_scores_of_a_known_prediction():
    truth, hidden = torch.zeros(10, 2), torch.arange(2).expand(10, 2) == 1
    task = Task(truth, truth, truth, hidden)
    normal = Normal(torch.ones(10, 2), 1.0)
    found = defaults.score(normal.mean, normal.log_prob(truth), [truth < -1.0, truth > -1.0], task)
    assert found == pytest.approx({"RMSE": 1.0, "NLPD": 1.4189385, "coverage 50%": 0.0, "coverage 90%": 1.0})


def test_a_quick_run_has_all_methods_and_a_summary():
    rows = aggregate(defaults.run(quick=True, seeds=1, only="iris"))
    assert {row.method for row in rows if row.dataset == "iris, new rows"} == {*PEERS, "GPLVMImputer"}
    assert _tasks(rows) == {"summary": 2, "summary, hidden entries": 1, "summary, new rows": 1}
    assert all(torch.tensor(row.mean).isfinite() for row in rows)


def test_a_quick_run_of_a_set_of_statsmodels_that_is_a_table_and_a_series():
    pytest.importorskip("statsmodels")
    rows = aggregate(defaults.run(quick=True, seeds=1, only="danish_data"))
    assert {row.method for row in rows if row.dataset == "danish_data, gaps in series"} == {*defaults.PEERS, "GPVAERegressor"}
    kinds = ("hidden entries", "new rows", "gaps in series")
    assert _tasks(rows) == {"summary": 3} | {f"summary, {kind}": 1 for kind in kinds}
    assert all(torch.tensor(row.mean).isfinite() for row in rows)


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with air_quality_uci.npz")
def test_a_quick_run_of_a_series_with_a_period_and_of_sizes_that_depend_on_the_seed(monkeypatch):
    monkeypatch.setattr(defaults, "GROUPS", {"series": defaults.GROUPS["series"]})  # tables are in the runs above
    rows = aggregate(defaults.run(quick=True, seeds=2, only="air_quality_uci"))
    assert _tasks(rows)["summary, gaps in series"] == 2
    assert all(torch.tensor(row.mean).isfinite() for row in rows)


def _tasks(rows):
    return {row.dataset: row.mean for row in rows if row.metric == "tasks"}


def test_summaries_count_the_tasks_that_a_peer_has():
    def measured(dataset, method, rmse):
        values = {"RMSE": rmse, "NLPD": rmse, "RMSE / best peer": rmse, "NLPD - best peer": rmse - 1.0, "coverage 90%": 0.9}
        return [Measurement(dataset, method, metric, value, 1.0, {}) for metric, value in values.items()]

    knn, line = "KNNImputer(5)", "linear interpolation"
    rows = measured("a", knn, 1.0) + measured("a", "GPLVMImputer", 1.2)
    rows += measured("b", knn, 3.0) + measured("b", line, 1.0) + measured("b", "GPVAERegressor", 0.8)
    found = {(m.method, m.metric): m.value for m in defaults.summary("all", rows)}
    both = "GPLVMImputer and GPVAERegressor"
    assert found[both, "share, RMSE at most the best peer's"] == 0.5
    assert found[both, "largest RMSE / best peer"] == 1.2
    assert found[knn, "share, RMSE of ours at most this peer's"] == 0.5
    assert found[line, "share, NLPD of ours at most this peer's"] == 1.0
