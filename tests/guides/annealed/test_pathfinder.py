"""Gaussian with the largest bound along a path of ascent."""

import math

import pytest
import torch

from pyro_lvgp.guides.annealed._pathfinder import best_gaussian

pytestmark = pytest.mark.usefixtures("float64")


class Density:
    """Target of one site by its log density."""

    def __init__(self, log_density):
        self.log_density = log_density

    def log_joint(self, z):
        return self.log_density(*z)

    def score(self, z):
        with torch.enable_grad():
            z = tuple(x.detach().requires_grad_() for x in z)
            return torch.autograd.grad(self.log_density(*z), z)


def start(dim, loc=0.0):
    return (torch.full((dim,), loc),), (torch.full((dim,), 0.1),)


def gaussian(loc, precision):
    return Density(lambda h: -0.5 * (h - loc) @ precision @ (h - loc))


def test_gaussians_are_found_with_their_conditional_scales():
    precision = torch.tensor([1e-2, 1.0, 1e6]).diag()
    precision[0, 1] = precision[1, 0] = 0.05
    loc = torch.tensor([300.0, -2.0, 0.5])
    (found,), (scale,), *_ = best_gaussian(gaussian(loc, precision), *start(3), correlated=False)
    assert torch.allclose(scale, precision.diagonal().rsqrt(), rtol=1e-6)
    assert ((found - loc).abs() < 0.01 * scale).all()


def test_scales_of_many_correlated_coordinates_are_estimated():
    torch.manual_seed(0)
    A = torch.randn(60, 60) / 60**0.5
    precision = 100.0 * (torch.eye(60) + 0.3 * A @ A.mT)
    (found,), (scale,), *_ = best_gaussian(gaussian(torch.ones(60), precision), *start(60), correlated=False)
    assert torch.allclose(found, torch.ones(60), atol=1e-3)
    assert torch.allclose(scale, precision.diagonal().rsqrt(), rtol=0.2)


def test_a_density_without_limit_has_no_best_gaussian_at_its_mode():
    """Nine group effects whose scale has a density that grows without limit at 0."""
    y = torch.linspace(-2.0, 2.0, 9)

    def log_density(h):
        log_scale, effects = h[0], h[1:]
        prior = -0.5 * (effects * (-log_scale).exp()).square().sum() - 9.0 * log_scale - 0.5 * (log_scale / 10.0).square()
        return prior - 0.5 * ((y - effects) / 0.5).square().sum()

    (loc,), (scale,), *_ = best_gaussian(Density(log_density), *start(10), correlated=False)
    assert abs(loc[0] - math.log(1.3)) < 0.5
    assert 0.1 < scale[0] < 0.5


@pytest.mark.parametrize("error", [ValueError, torch.linalg.LinAlgError])
def test_points_where_the_model_is_not_defined_are_left_out(error):
    def log_density(h):
        if (h > 4.0).any():
            raise error("not defined")
        return -0.5 * (h - 3.0).square().sum() / 0.1

    (loc,), (scale,), *_ = best_gaussian(Density(log_density), *start(2, -50.0), correlated=True)
    assert torch.allclose(loc, torch.full((2,), 3.0), atol=1e-3)
    assert torch.allclose(scale, torch.full((2,), 0.1**0.5), rtol=1e-3)


def test_densities_without_an_ascent_keep_the_start():
    nowhere = Density(lambda h: (0.0 * h).sum() - math.inf)
    (loc,), (scale,), factor, is_gaussian = best_gaussian(nowhere, *start(2, 1.0), correlated=True)
    assert torch.equal(loc, torch.ones(2))
    assert torch.equal(scale, torch.full((2,), 0.1))
    assert factor is None
    assert not is_gaussian


def test_correlations_are_those_of_the_inverse_hessian():
    """Of two sites, one coordinate of which is a hundred times narrower given the others than by itself."""
    loc, covariance = torch.tensor([3.0, -1.0, 0.5]), torch.tensor([[1.0, 0.9999, 0.3], [0.9999, 1.0, 0.3], [0.3, 0.3, 4.0]])
    precision = covariance.inverse()

    def log_density(a, b):
        h = torch.cat([a, b.reshape(-1)]) - loc
        return -0.5 * h @ precision @ h

    sites = (torch.zeros(2), torch.zeros(1, 1)), (torch.full((2,), 0.1), torch.full((1, 1), 0.1))
    locs, _, factor, is_gaussian = best_gaussian(Density(log_density), *sites, correlated=True)
    assert torch.allclose(factor @ factor.mT, covariance, rtol=1e-5)
    assert torch.equal(factor, factor.tril())
    assert (factor.diagonal() > 0.0).all()
    assert is_gaussian
    assert torch.allclose(torch.cat([locs[0], locs[1].reshape(-1)]), loc, atol=1e-3)
