"""The imputation benchmark: its peer against closed forms, its scores on known answers, a quick run."""

import os

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

pytest.importorskip("gpytorch")

from benchmarks.peers.ppca import PPCA
from benchmarks.tasks import imputation


@pytest.fixture
def Y():
    W = torch.randn(6, 2, dtype=torch.float64)
    return torch.randn(300, 2, dtype=torch.float64) @ W.mT + 0.3 * torch.randn(300, 6, dtype=torch.float64) + 5.0


def _log_likelihood(fitted, Y):
    total = 0.0
    for y in Y:
        o = ~torch.isnan(y)
        covariance = fitted.covariance()[o][:, o]
        row = torch.distributions.MultivariateNormal(fitted.loadings[o, -1], covariance)
        total += row.log_prob(y[o]).item()
    return total


def test_complete_data_have_the_closed_form(Y):
    fitted, known = PPCA(Y, 2).fit(500), PCA(2).fit(Y.numpy())
    # scikit-learn divides variances by N - 1, maximum likelihood by N.
    np.testing.assert_allclose(fitted.covariance(), known.get_covariance() * 299 / 300, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(fitted.loadings[:, -1], known.mean_)
    gain = torch.linalg.solve(fitted.covariance(), (Y - Y.mean(0)).mT)
    W = fitted.loadings[:, :2]
    torch.testing.assert_close(fitted.reconstruct(), Y.mean(0) + (W @ W.mT @ gain).mT)


def test_each_iteration_raises_the_likelihood_of_what_is_observed(Y):
    hidden = torch.rand(60, 6) < 0.4
    hidden[:, 0] &= ~hidden.all(1)  # an empty row has no density
    Y = Y[:60].masked_fill(hidden, torch.nan)
    fitted = PPCA(Y, 2)
    values = [_log_likelihood(fitted.fit(1), Y) for _ in range(15)]
    assert (np.diff(values) > 0.0).all()
    assert values[-1] > values[0] + 1.0


def test_hidden_entries_are_their_conditional_means(Y):
    hidden = torch.rand(300, 6) < 0.3
    fitted = PPCA(Y.masked_fill(hidden, torch.nan), 2).fit(50)
    n = int(hidden.sum(1).argmax())
    o, m = ~hidden[n], hidden[n]
    S, c = fitted.covariance(), fitted.loadings[:, -1]
    expected = c[m] + S[m][:, o] @ torch.linalg.solve(S[o][:, o], Y[n, o] - c[o])
    torch.testing.assert_close(fitted.reconstruct()[n, m], expected)
    guessed = Y.masked_fill(hidden, torch.nan).nanmean(0).expand_as(Y)
    error, naive = ((x - Y)[hidden].square().mean() for x in (fitted.reconstruct(), guessed))
    assert error < 0.3 * naive


def test_errors_are_those_of_hidden_and_of_all_entries():
    task = imputation.make_task(np.zeros((200, 50)), 0.3, seed=0)
    assert task.hidden.double().mean().item() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(torch.isnan(task.Y), task.hidden)
    expected = torch.where(task.hidden, 0.5, 0.1)
    part = task.hidden.double().mean().item()
    scores = task.score(expected, complete=True)
    assert scores[imputation.HIDDEN] == pytest.approx(0.25)
    assert scores[imputation.ALL] == pytest.approx(0.25 * part + 0.01 * (1.0 - part))
    assert set(task.score(expected, complete=False)) == {imputation.HIDDEN}
    assert set(imputation.make_task(np.zeros((2, 2)), 0.0, seed=0).score(torch.zeros(2, 2), complete=True)) == {imputation.ALL}


def test_hidden_entries_are_those_of_the_seed_and_rates_hide_more_of_the_same():
    tasks = [
        imputation.make_task(np.zeros((30, 20)), rate, seed=seed) for rate, seed in ((0.1, 0), (0.1, 0), (0.6, 0), (0.1, 1))
    ]
    assert torch.equal(tasks[0].hidden, tasks[1].hidden)
    assert not torch.equal(tasks[0].hidden, tasks[3].hidden)
    assert (tasks[2].hidden | ~tasks[0].hidden).all()


def test_all_methods_are_measured_and_the_curved_one_is_ours():
    """Pictures of a bump that moves round a ring: two latents, but no plane."""
    angle, pixels = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, 150), np.linspace(0.0, 2.0 * np.pi, 24, endpoint=False)
    truth = np.exp(2.0 * np.cos(angle[:, None] - pixels) - 2.0)
    task = imputation.make_task(truth, 0.3, seed=0)
    values = {}
    for measured in imputation.measure("ring", task, 60, 10, 20, seed=0):
        values[measured.method, measured.metric] = measured.value
        assert measured.seconds > 0.0
    assert len(values) == 9
    hidden = {name: value for (name, metric), value in values.items() if metric == imputation.HIDDEN}
    assert hidden["RandomFeatureLVM, Q = 2"] < 0.2 * hidden["PPCA, 2 factors"]
    assert max(hidden.values()) < 1.1 * truth.var()


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data")
@pytest.mark.parametrize(("name", "shape"), [("cifar", (2000, 400)), ("frey", (1965, 560))])
def test_pictures_are_those_described(name, shape):
    truth = imputation.TASKS[name]()
    assert truth.shape == shape
    assert 0.0 <= truth.min() < 0.1
    assert 0.9 < truth.max() <= 1.0
