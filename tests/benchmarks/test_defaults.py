"""Peers of the benchmark of defaults against dense conditional distributions, its splits and scores, and a quick run."""

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from benchmarks.core.report import aggregate
from benchmarks.peers.table_imputers import PEERS, _em_step, given
from benchmarks.tasks import defaults
from benchmarks.tasks.defaults_data import Task, load_tasks

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
    filled = PEERS[peer](task.train, task.rows, 0)
    error = (filled.mean - task.truth)[task.hidden]
    assert error.square().mean() < 1.0  # the variance of the columns
    torch.testing.assert_close(filled.mean[~task.hidden], task.truth[~task.hidden], rtol=1e-4, atol=1e-4)


def test_splits_hide_what_they_say():
    tasks = load_tasks("wine", 0)
    new, entries = tasks["new rows"], tasks["hidden entries"]
    assert new.hidden.sum(1).eq(6).all()
    assert 0.15 < entries.hidden.double().mean() < 0.25
    assert torch.equal(new.rows.isnan(), new.hidden)
    assert torch.equal(entries.rows.isnan(), entries.hidden)
    torch.testing.assert_close(new.train.square().mean(0), torch.ones(13))


def test_scores_of_a_known_prediction():
    truth, hidden = torch.zeros(10, 2), torch.arange(2).expand(10, 2) == 1
    task = Task(truth, truth, truth, hidden)
    normal = Normal(torch.ones(10, 2), 1.0)
    found = defaults.score(normal.mean, normal.log_prob(truth), [truth < -1.0, truth > -1.0], task)
    assert found == pytest.approx({"RMSE": 1.0, "NLPD": 1.4189385, "coverage 50%": 0.0, "coverage 90%": 1.0})


def test_a_quick_run_has_all_methods_and_a_summary():
    rows = aggregate(defaults.run(quick=True, seeds=1, only="iris"))
    assert {row.method for row in rows if row.dataset == "iris, new rows"} == {*PEERS, defaults.OURS}
    (tasks,) = (row.mean for row in rows if row.dataset == "summary" and row.metric == "tasks")
    assert tasks == 2
    assert all(torch.tensor(row.mean).isfinite() for row in rows)
