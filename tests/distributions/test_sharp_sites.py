"""Posteriors under sites that are much more precise than the prior: KL divergences, joint draws and their densities."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.distributions import GaussianProcess, StructuredPosterior
from pyro_lvgp.kernels import RBF


def make(num_points, precision, site_mean, *, lengthscale=0.2, dtype=torch.float64):
    torch.set_default_dtype(dtype)
    prior = GaussianProcess(RBF(1, lengthscale=lengthscale), torch.linspace(0.0, 1.0, num_points)[:, None])
    return StructuredPosterior(prior, site_mean.to(dtype), torch.full((num_points,), precision))


@pytest.mark.parametrize("precision", [1.0, 1e2, 1e4, 1e6])
def test_the_kl_divergence_in_float32_is_that_in_float64(precision):
    site_mean = torch.randn(400)
    q = make(400, precision, site_mean, dtype=torch.float32)
    kl = kl_divergence(q, q.prior)
    exact = StructuredPosterior(q.prior.double(), q.site_mean.double(), q.site_precision.double())
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), kl_divergence(exact, exact.prior), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("precision", [1e8, 1e14, 1e20, 1e30])
def test_kl_divergences_are_not_negative(precision):
    for site_mean in (torch.zeros(300), torch.linspace(0.0, 5.0, 300).sin(), torch.randn(300)):
        for dtype in (torch.float32, torch.float64):
            q = make(300, precision, site_mean, dtype=dtype)
            assert kl_divergence(q, q.prior) >= 0.0


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, 1e6), (torch.float64, 1e6), (torch.float64, 1e10)])
def test_log_densities_of_joint_draws_average_to_the_kl_divergence(dtype, precision):
    """The divergence is that from the prior of the draws, with the jitter of its factor, by the closed form for normals."""
    site_mean = torch.linspace(0.0, 5.0, 30, dtype=torch.float64).sin()
    q = make(30, precision, site_mean, dtype=dtype)
    f = q.rsample((2000,))
    log_ratio = (q.log_prob(f) - q.prior.log_prob(f)).double()
    prior = MultivariateNormal(torch.zeros(30).double(), scale_tril=q.prior.double().scale_tril)
    exact = StructuredPosterior(prior, q.site_mean.double(), q.site_precision.double())
    dense = MultivariateNormal(exact.mean, _covariance(exact))
    torch.testing.assert_close(kl_divergence(exact, prior), kl_divergence(dense, prior), rtol=1e-3, atol=0.0)
    error = log_ratio.std() / len(f) ** 0.5
    assert (log_ratio.mean() - kl_divergence(exact, prior)).abs() < 4.0 * error


def _covariance(q):
    """(K⁻¹ + Λ)⁻¹, by the factor of K."""
    L, precision = q.prior.scale_tril, q.site_precision
    inner = torch.linalg.cholesky(torch.eye(len(L)).double() + L.mT @ (precision[:, None] * L))
    half = torch.linalg.solve_triangular(inner, L.mT, upper=False)
    return half.mT @ half
