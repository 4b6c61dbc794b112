"""Mixtures of Gaussians of rows with gaps beside dense conditionals and moments in closed form."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_lvgp.conjugate.gaussian_mixture import GaussianMixture, gaussian_mixture

pytestmark = pytest.mark.usefixtures("float64")


def random_mixture(K=3, D=5):
    root = torch.randn(K, D, D)
    return GaussianMixture(torch.rand(K).add(0.1).softmax(0), torch.randn(K, D), root @ root.mT + 0.1 * torch.eye(D))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_condition_is_that_of_dense_gaussians(share):
    mixture = random_mixture()
    Y = torch.randn(20, 5).masked_fill(torch.rand(20, 5) < share, torch.nan)
    if share == 0.4:
        Y[0], Y[1] = torch.nan, torch.randn(5)
    rows = mixture.condition(Y)
    covariances = torch.zeros(20, 3, 5, 5)
    for n, columns in enumerate(rows.missing):
        covariances[n][:, columns[:, None], columns] = rows.covariance[n]
    torch.testing.assert_close(rows.variance(), covariances.diagonal(dim1=-2, dim2=-1))
    for n, y in enumerate(Y):
        o, m = ~y.isnan(), y.isnan()
        joint = mixture.weight.log()
        for k, (mean, covariance) in enumerate(zip(mixture.mean, mixture.covariance, strict=True)):
            gain = torch.linalg.solve(covariance[o][:, o], covariance[o][:, m])
            torch.testing.assert_close(rows.mean[n, k, m], mean[m] + (y[o] - mean[o]) @ gain)
            torch.testing.assert_close(covariances[n, k][m][:, m], covariance[m][:, m] - covariance[m][:, o] @ gain)
            torch.testing.assert_close(rows.mean[n, k, o], y[o])
            assert not covariances[n, k][o].any()
            if o.any():
                joint[k] += MultivariateNormal(mean[o], covariance[o][:, o]).log_prob(y[o])
        torch.testing.assert_close(rows.log_prob[n], joint.logsumexp(0))
        torch.testing.assert_close(rows.log_weight[n], joint.log_softmax(0))


def test_no_rows_have_no_moments():
    rows = random_mixture().condition(torch.zeros(0, 5))
    assert rows.mean.shape == (0, 3, 5)
    assert rows.variance().shape == (0, 3, 5)
    assert rows.log_prob.shape == (0,)


def test_a_gaussian_of_complete_rows_has_their_mean_and_the_shrunk_covariance():
    Y = torch.randn(30, 4) @ torch.randn(4, 4)
    found = gaussian_mixture(Y, 1)
    scatter = (Y - Y.mean(0)).mT @ (Y - Y.mean(0))
    want = (scatter + 4 * scatter.diagonal().diag() / 30) / 34 + 1e-4 * Y.var(0, correction=0).diag()
    torch.testing.assert_close(found.mean[0], Y.mean(0))
    torch.testing.assert_close(found.covariance[0], want)


def test_missing_entries_do_not_bias_the_covariance():
    root = torch.randn(4, 4)
    Y = (torch.randn(4000, 4) @ root.mT).masked_fill(torch.rand(4000, 4) < 0.4, torch.nan)
    found, want = gaussian_mixture(Y, 1, num_iterations=30).covariance[0], root @ root.mT
    scale = want.diagonal().sqrt()
    assert ((found - want) / scale / scale[:, None]).abs().max() < 4.0 * 1440**-0.5  # errors of 4000 · 0.36 pairs


def test_separate_groups_are_found_in_rows_with_gaps():
    true = GaussianMixture(
        torch.tensor([0.3, 0.7]),
        torch.tensor([[-6.0, 0.0, 6.0], [6.0, 1.0, -6.0]]),
        torch.stack([torch.eye(3) + 0.8 * (1.0 - torch.eye(3)), torch.eye(3) - 0.4 * (1.0 - torch.eye(3))]),
    )
    labels = torch.rand(1500) < true.weight[1]
    Y = MultivariateNormal(true.mean[labels.long()], true.covariance[labels.long()]).sample()
    Y = Y.masked_fill(torch.rand(1500, 3) < 0.2, torch.nan)
    found = gaussian_mixture(Y, 2)
    order = found.mean[:, 0].argsort()
    torch.testing.assert_close(found.weight[order], true.weight, atol=0.05, rtol=0.0)
    torch.testing.assert_close(found.mean[order], true.mean, atol=0.2, rtol=0.0)  # four standard errors of 400 rows
    torch.testing.assert_close(found.covariance[order], true.covariance, atol=0.28, rtol=0.0)


def test_no_more_components_than_distinct_rows():
    Y = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(5, 1)
    found = gaussian_mixture(Y, 4)
    assert len(found.weight) == 2
    assert all(part.isfinite().all() for part in found)
