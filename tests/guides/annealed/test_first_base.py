"""Gaussians with large bounds: along a path of ascent, for fixed draws, and with correlations."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides.annealed._first_base import best_gaussian, first_base
from pyro_lvgp.guides.annealed._gaussian_fit import full_covariance_optimum, mean_field_optimum
from pyro_lvgp.guides.annealed._pathfinder import best_on_path
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.infer import _recorded_function
from tests.guides.annealed._densities import joint_density

pytestmark = pytest.mark.usefixtures("float64")


def start(dim, loc=0.0):
    return torch.full((dim,), loc), torch.full((dim,), 0.1)


def gaussian(loc, precision):
    return joint_density(lambda h: -0.5 * ((h - loc) @ precision * (h - loc)).sum(-1), loc.shape)


def log_gamma(shape, rate):
    """Density of independent logarithms of Gamma variables."""
    return joint_density(lambda h: (shape * h - rate * h.exp()).sum(-1), shape.shape)


def funnel():
    """Neal's funnel, whose best mean-field Gaussian is far from its mode."""

    def log_density(h):
        v, x = h[..., :1], h[..., 1:]
        return -0.5 * (v / 3.0).square().sum(-1) + (-0.5 * (x * (-0.5 * v).exp()).square() - 0.5 * v).sum(-1)

    return joint_density(log_density, (10,))


class TestPath:
    def test_gaussians_are_found_with_their_conditional_scales(self):
        precision = torch.tensor([1e-2, 1.0, 1e6]).diag()
        precision[0, 1] = precision[1, 0] = 0.05
        loc = torch.tensor([300.0, -2.0, 0.5])
        found, scale, _ = best_on_path(gaussian(loc, precision), *start(3))
        assert torch.allclose(scale, precision.diagonal().rsqrt(), rtol=1e-6)
        assert ((found - loc).abs() < 0.01 * scale).all()

    def test_scales_of_many_correlated_coordinates_are_estimated(self):
        torch.manual_seed(0)
        A = torch.randn(60, 60) / 60**0.5
        precision = 100.0 * (torch.eye(60) + 0.3 * A @ A.mT)
        found, scale, _ = best_on_path(gaussian(torch.ones(60), precision), *start(60))
        assert torch.allclose(found, torch.ones(60), atol=1e-3)
        assert torch.allclose(scale, precision.diagonal().rsqrt(), rtol=0.2)

    def test_a_density_without_limit_has_no_best_gaussian_at_its_mode(self):
        """Nine group effects whose scale has a density that grows without limit at 0."""
        y = torch.linspace(-2.0, 2.0, 9)

        def log_density(h):
            log_scale, effects = h[..., :1], h[..., 1:]
            prior = -0.5 * (effects * (-log_scale).exp()).square() - log_scale - 0.5 * (log_scale / 10.0).square() / 9.0
            return (prior - 0.5 * ((y - effects) / 0.5).square()).sum(-1)

        loc, scale, _ = best_on_path(joint_density(log_density, (10,)), *start(10))
        assert abs(loc[0] - math.log(1.3)) < 0.5
        assert 0.1 < scale[0] < 0.5


class TestMeanFieldOptimum:
    def test_of_logarithms_of_gamma_variables_has_its_closed_form(self):
        """From E_q[exp(h)] = exp(m + s² / 2): s² = 1 / a, and m = log(a / b) - 1 / (2 a)."""
        shape, rate = torch.logspace(-0.5, 3.0, 200), torch.logspace(3.0, -3.0, 200)
        loc, stddev = mean_field_optimum(log_gamma(shape, rate), *start(200))
        expected = shape.rsqrt()
        errors = torch.stack([(loc - (shape / rate).log() + 0.5 / shape) / expected, (stddev / expected).log()])
        # Those of samples of 32 draws, largest for the distributions with the largest skewness.
        assert (errors.abs() < 0.5).all()
        assert (errors[:, shape > 2.0].abs() < 0.2).all()
        assert (errors.mean(1).abs() < 0.03).all()

    def test_of_a_gaussian_has_its_conditional_scales(self):
        precision = torch.tensor([[4.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1e6]])
        found, stddev = mean_field_optimum(gaussian(torch.tensor([30.0, -2.0, 0.5]), precision), *start(3))
        assert torch.allclose(found, torch.tensor([30.0, -2.0, 0.5]), atol=1e-3)
        assert torch.allclose(stddev, precision.diagonal().rsqrt(), rtol=0.1)

    def test_is_that_of_points_one_by_one(self):
        shape = torch.tensor([0.5, 20.0])

        def one_by_one(h):
            assert h.dim() == 1
            return (shape * h - h.exp()).sum()

        together = mean_field_optimum(log_gamma(shape, torch.ones(2)), *start(2))
        apart = mean_field_optimum(joint_density(one_by_one, (2,), max_points=1), *start(2))
        torch.testing.assert_close(apart, together)

    def test_has_a_larger_bound_than_its_start(self):
        density = funnel()
        assert density.bound(*mean_field_optimum(density, *start(10))) > density.bound(*start(10)) + 3.0


class TestFullCovarianceOptimum:
    def test_is_a_fixed_point_of_its_equations(self):
        """Of Poisson counts with rates exp(W h): Λ = Wᵀ diag(E[exp(W h)]) W, and Wᵀ (1 - E[exp(W h)]) = 0."""
        torch.manual_seed(0)
        W = 0.5 * torch.randn(30, 4)
        density = joint_density(lambda h: (h @ W.mT - (h @ W.mT).exp()).sum(-1), (4,))
        loc, factor = full_covariance_optimum(density, *start(4), density.bound(*start(4)))
        rate = (W @ loc + 0.5 * (W @ factor).square().sum(-1)).exp()
        gradient, precision = W.mT @ (1.0 - rate), W.mT @ (rate[:, None] * W)
        assert torch.allclose(factor.mT @ precision @ factor, torch.eye(4), atol=0.1)
        assert ((factor.mT @ gradient).abs() < 0.1).all()

    def test_of_negative_curvature_is_positive(self):
        density = joint_density(lambda h: 0.5 * h[..., 0].square() - 2.0 * h[..., 1].square(), (2,))
        _, factor = full_covariance_optimum(density, *start(2), density.bound(*start(2)))
        assert torch.isfinite(factor).all()
        assert factor[1, 1].item() == pytest.approx(0.5)

    @pytest.mark.parametrize("correlation", [0.9, 0.9999, 1.0 - 1e-8])
    def test_is_a_gaussian_with_correlations(self, correlation):
        """Of two sites, one coordinate of which is much narrower given the others than by itself."""
        loc, covariance = (
            torch.tensor([3.0, -1.0, 0.5]),
            torch.tensor([[1.0, correlation, 0.3], [correlation, 1.0, 0.3], [0.3, 0.3, 4.0]]),
        )
        precision = covariance.inverse()

        def log_density(a, b):
            h = torch.cat([a, b[..., 0]], -1) - loc
            return -0.5 * (h @ precision * h).sum(-1)

        found, factor = best_gaussian(joint_density(log_density, (2,), (1, 1)), *start(3), correlated=True)
        assert torch.allclose(factor @ factor.mT, covariance, rtol=1e-5)
        assert torch.equal(factor, factor.tril())
        assert (factor.diagonal() > 0.0).all()
        assert torch.allclose(found, loc, atol=1e-3)

    def test_diagonal_gaussians_with_larger_bounds_remain(self):
        """Of a funnel, where correlations cannot help."""
        _, factor = best_gaussian(funnel(), *start(10), correlated=True)
        assert factor.shape == (10,)


@pytest.mark.parametrize("error", [ValueError, torch.linalg.LinAlgError])
def test_points_where_the_model_is_not_defined_are_left_out(error):
    def log_density(h):
        if (h > 4.5).any():
            raise error("not defined")
        return -0.5 * (h - 3.0).square().sum(-1) / 0.1

    loc, scale = best_gaussian(joint_density(log_density, (2,)), *start(2, -50.0), correlated=False)
    assert torch.allclose(loc, torch.full((2,), 3.0), atol=1e-3)
    assert torch.allclose(scale, torch.full((2,), 0.1**0.5), rtol=1e-3)


def test_densities_without_an_ascent_keep_the_start():
    nowhere = joint_density(lambda h: (0.0 * h).sum(-1) - math.inf, (2,))
    loc, scale = best_gaussian(nowhere, *start(2, 1.0), correlated=True)
    assert torch.equal(loc, torch.ones(2))
    assert torch.equal(scale, torch.full((2,), 0.1))


def test_a_recorded_density_leads_to_the_same_gaussian_to_the_last_bit(monkeypatch):
    """Also of a model with constraints, whose parameters are invalid at some points of a line search."""
    counts = torch.tensor([3.0, 0.0, 5.0, 2.0])

    def model():
        nonlocal num_calls
        num_calls += 1
        scale = pyro.sample("scale", dist.HalfNormal(0.5))
        with pyro.plate("rows", 4):
            effect = pyro.sample("effect", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Poisson(4.0 + effect), obs=counts)

    found = []
    for num_eager in (5, math.inf):
        pyro.clear_param_store()
        monkeypatch.setattr(_recorded_function, "_NUM_EAGER", num_eager)
        torch.manual_seed(0)
        num_calls, guide = 0, MeanFieldGuide(model)
        guide()
        base = first_base(guide, model, ["scale", "effect"], (), {}, correlated=True)
        found.append((torch.cat([*map(torch.flatten, base.loc), base.factor.flatten()]), num_calls))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] < 0.8 * found[1][1]
