"""Warped normals against scikit-learn's transformation, automatic derivatives, quadrature and draws."""

import pytest
import torch
from sklearn.preprocessing import PowerTransformer

from pyro_lvgp.distributions import WarpedNormal, YeoJohnsonTransform

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def skewed():
    torch.manual_seed(0)
    normal = torch.randn(300, 3)
    return torch.stack([normal[:, 0].exp(), 50.0 - 3.0 * normal[:, 1].exp(), 2.0 + normal[:, 2]], 1)


def test_is_the_power_transformation_of_standardised_data(skewed):
    standardised = (skewed - skewed.mean(0)) / skewed.std(0, correction=0)
    expected = torch.as_tensor(PowerTransformer().fit_transform(standardised.numpy()))
    torch.testing.assert_close(YeoJohnsonTransform.from_data(skewed)(skewed), expected, rtol=1e-5, atol=1e-5)


def test_missing_entries_do_not_count_and_stay_missing(skewed):
    gaps = skewed.clone()
    gaps[100:, 0] = torch.nan
    t = YeoJohnsonTransform.from_data(gaps)(gaps)
    assert torch.equal(t.isnan(), gaps.isnan())
    torch.testing.assert_close(t[:100, :1], YeoJohnsonTransform.from_data(skewed[:100])(skewed[:100])[:, :1])


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.7, 2.0, 3.0])
def test_inverse_and_jacobian_inside_and_outside_the_data(power):
    one = torch.ones(1)
    warp = YeoJohnsonTransform(torch.tensor([power]), 3.0 * one, 2.0 * one, (-1.5 * one, 2.0 * one), (0.1 * one, 0.8 * one))
    y = torch.linspace(-20.3, 20.0, 41)[:, None].requires_grad_()  # not at the limits, where the slope jumps
    t = warp(y)
    assert (t.diff(dim=0) > 0.0).all()
    torch.testing.assert_close(warp.inv(t), y)
    (slope,) = torch.autograd.grad(t.sum(), y)
    torch.testing.assert_close(warp.log_abs_det_jacobian(y, t).exp(), slope)
    # Outside the data a standard deviation of t is at most one of y.
    assert (warp.inv(torch.full((1, 1), 1e3)) - 3.0).abs() < 2.0 * (1e3 + 10.0)


def test_columns_that_do_not_vary_are_shifted():
    warp = YeoJohnsonTransform.from_data(torch.tensor([[5.0, 1.0], [5.0, 2.0]]))
    torch.testing.assert_close(warp(torch.tensor([[5.0, 1.5]])), torch.zeros(1, 2), atol=0.1, rtol=0.0)
    with pytest.raises(ValueError, match="an observed entry in every column of Y"):
        YeoJohnsonTransform.from_data(torch.tensor([[torch.nan, 1.0]]))


@pytest.mark.parametrize("error", [None, torch.tensor([0.0, 0.3, 1.0])])
def test_density_mean_and_variance_agree_with_a_fine_grid_and_draws(skewed, error):
    warp = YeoJohnsonTransform.from_data(skewed)
    loc, scale, factors, weights = map(torch.tensor, ([0.5, -0.5, 0.0], [0.6, 0.4, 1.0], [0.5, 2.0], [0.7, 0.3]))
    y = WarpedNormal(loc, scale, warp, factors, weights, error)
    t = torch.linspace(-12.0, 12.0, 40_001)[:, None].expand(-1, 3)
    grid = warp.inv(t)
    density = y.log_prob(grid).exp()
    variances = (factors[:, None] * scale).square() + (0.0 if error is None else error.square())
    normals = torch.distributions.Normal(loc, variances.sqrt())
    before = (weights[:, None] * normals.log_prob(t[:, None]).exp()).sum(1)  # of g(y)
    torch.testing.assert_close(density, before * warp.log_abs_det_jacobian(grid, t).exp())
    torch.testing.assert_close(torch.trapezoid(density, grid, dim=0), torch.ones(3), rtol=1e-4, atol=0.0)
    mean = torch.trapezoid(density * grid, grid, dim=0)
    variance = torch.trapezoid(density * (grid - mean) ** 2, grid, dim=0)
    # The trapezoidal rule is not exact where the slope jumps, at the largest datum.
    assert ((y.mean - mean).abs() < 0.005 * variance.sqrt()).all()
    torch.testing.assert_close(y.variance, variance, rtol=0.05, atol=0.0)
    draws = y.sample((100_000,))
    assert ((draws.mean(0) - mean).abs() < 4.0 * draws.std(0) / 100_000**0.5).all()
    assert y.sample((0,)).shape == (0, 3)
