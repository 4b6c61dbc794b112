"""Expectations of logistic functions against a fine trapezoidal rule."""

import pytest
import torch
from torch.nn.functional import softplus

from pyro_lvgp.ops.logistic import expected_logistic, expected_softplus

pytestmark = pytest.mark.usefixtures("float64")
MEAN = torch.tensor([0.0, 0.3, -5.0, 30.0, -200.0], dtype=torch.float64)[:, None]
SD = torch.tensor([0.0, 1e-3, 0.5, 2.0, 20.0, 300.0], dtype=torch.float64)


def expectation(g):
    """E[g(f)] by 400 001 nodes."""
    z = torch.linspace(-12.0, 12.0, 400_001)
    weights = torch.exp(-0.5 * z.square())
    f = MEAN[..., None] + SD[:, None] * z
    return (g(f) * (weights / weights.sum())).sum(-1)


def test_expectations_for_all_means_and_variances():
    torch.testing.assert_close(expected_softplus(MEAN, SD.square()), expectation(softplus), rtol=1e-9, atol=1e-11)
    p, slope = expected_logistic(MEAN, SD.square())
    torch.testing.assert_close(p, expectation(torch.sigmoid), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(slope, expectation(lambda f: f.sigmoid() * (-f).sigmoid()), rtol=1e-9, atol=1e-11)


def test_gradients_are_the_expected_derivatives():
    """By Bonnet's and Price's theorems."""
    mean, variance = MEAN.expand(5, 6).clone().requires_grad_(), SD.square().expand(5, 6).clone().requires_grad_()
    of_mean, of_variance = torch.autograd.grad(expected_softplus(mean, variance).sum(), (mean, variance))
    p, slope = expected_logistic(MEAN, SD.square())
    torch.testing.assert_close(of_mean, p)
    torch.testing.assert_close(of_variance, 0.5 * slope)
