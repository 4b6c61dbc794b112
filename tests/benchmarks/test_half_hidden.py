"""The half-hidden benchmark: a mixture's conditional against its definition, and all methods for a few steps."""

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

pytest.importorskip("gpytorch")

from benchmarks.tasks import half_hidden
from pyro_lvgp.models import latent_mixture

nan = torch.nan


pytestmark = pytest.mark.usefixtures("float64")


def test_a_mixture_given_a_part_is_its_joint_density_over_the_marginal():
    weights, means = torch.tensor([0.3, 0.7]), torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    covariances = torch.tensor([[[1.0, 0.6], [0.6, 2.0]], [[0.5, -0.3], [-0.3, 1.0]]])
    Y, truth = torch.tensor([[0.7, nan], [nan, 0.2]]), torch.tensor([[0.7, -0.4], [1.1, 0.2]])
    mean, log_density = half_hidden.mixture_given(weights, means, covariances, Y, truth)
    joint = MixtureSameFamily(Categorical(weights), MultivariateNormal(means, covariances))
    grid = torch.linspace(-15.0, 15.0, 20_001)
    for row, column in ((0, 1), (1, 0)):
        points = Y[row].expand(len(grid), 2).clone()
        points[:, column] = grid
        density = joint.log_prob(points).exp()
        total = torch.trapezoid(density, grid)
        torch.testing.assert_close(mean[row, column], torch.trapezoid(grid * density, grid) / total)
        torch.testing.assert_close(log_density[row, column], joint.log_prob(truth[row]) - total.log())
        assert mean[row, 1 - column] == Y[row, 1 - column]


def test_a_third_of_the_observed_entries():
    hidden = torch.rand(50, 12).argsort(-1) < 6
    fold = half_hidden.third_of_observed(hidden, torch.Generator().manual_seed(0))
    assert not (fold & hidden).any()
    assert (fold.sum(-1) == 2).all()


def test_shares_of_predictions():
    parts = [half_hidden.Predicted(torch.full((1, 2), mean), torch.full((1, 2), mean - 1.0)) for mean in (0.0, 2.0)]
    equal, first = half_hidden.pooled(parts), half_hidden.pooled(parts, [1.0, 0.0])
    torch.testing.assert_close(equal.mean, torch.ones(1, 2))
    torch.testing.assert_close(equal.log_density, torch.full((1, 2), math.log(0.5 * math.exp(-1.0) + 0.5 * math.exp(1.0))))
    torch.testing.assert_close(first, parts[0])


@pytest.mark.parametrize("name", list(half_hidden.METHODS))
def test_methods_predict_rows_never_seen(name):
    train = torch.randn(200, 2) @ torch.randn(2, 12) + 0.1 * torch.randn(200, 12)
    model, guide, seconds, _ = half_hidden.METHODS[name](train, 0, 3)
    truth = train[:4] + 0.01
    Y = truth.clone()
    Y[:, ::2] = nan
    prior = latent_mixture(guide(train)["X"].detach(), 3)
    for infer in half_hidden.POSTERIORS.values():
        mean, log_density = half_hidden.moments(model, guide, infer(model, guide, Y, prior), truth)
        assert mean.shape == log_density.shape == Y.shape
        # Better than the mean of each column with its standard deviation.
        error = (mean - truth)[:, ::2].square().mean().sqrt()
        assert error < train.std()
        plain = -Normal(train.mean(0), train.std(0)).log_prob(truth)[:, ::2].mean()
        assert -log_density[:, ::2].mean() < plain + math.log(2.0)
    assert seconds > 0.0
