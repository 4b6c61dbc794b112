"""Densities of sums of Student-t and Gaussian variables against dense sums over precisions."""

import math

import pytest
import torch

from pyro_lvgp.ops.student_t import log_student_t_plus_normal, log_student_t_plus_normal_derivatives

RESIDUALS, VARIANCES = (0.0, 0.3, 3.0, 30.0, 300.0, 1e4), (0.0, 1e-4, 1.0, 1e3, 1e6)  # in units of scales


def oracle(r: torch.Tensor, s: float, df: float, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log density and derivatives in r by 10 001 precisions for each entry."""
    half = 0.5 * df
    farthest = 40.0 / half + math.sqrt(80.0 / half)
    left = -torch.log1p(r.square() / (df * s**2)) - farthest
    x = left + torch.linspace(0.0, 1.0, 10_001, dtype=r.dtype)[:, None, None] * (math.log1p(farthest) - left)
    precision = 1.0 / (v + s**2 * torch.exp(-x))
    log_normal = 0.5 * (precision.log() - math.log(2.0 * math.pi) - r.square() * precision)
    terms = log_normal + half * (x - x.expm1()) + half * (math.log(half) - 1.0) - math.lgamma(half)
    weights = terms.softmax(0)
    mean = (weights * precision).sum(0)
    square = (weights * (precision - mean).square()).sum(0)
    return terms.logsumexp(0) + (x[1] - x[0]).log(), -r * mean, r.square() * square - mean


@pytest.mark.parametrize("scale", [0.01, 1.0])
@pytest.mark.parametrize("df", [2.1, 4.0, 30.0, 200.0])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.float64, 1e-8)], ids=["float32", "float64"])
def test_densities_and_derivatives(dtype, rtol, df, scale):
    r = scale * torch.tensor(RESIDUALS, dtype=torch.float64)
    v = scale**2 * torch.tensor(VARIANCES, dtype=torch.float64)[:, None]
    expected = oracle(r, scale, df, v)
    inputs = r.to(dtype), torch.tensor(scale, dtype=dtype), df, v.to(dtype)
    found = log_student_t_plus_normal_derivatives(*inputs)
    units = 1.0, scale, scale**2
    for ours, exact, unit in zip(found, expected, units, strict=True):
        torch.testing.assert_close(unit * ours.double(), unit * exact, rtol=rtol, atol=rtol)
    torch.testing.assert_close(log_student_t_plus_normal(*inputs), found[0])
