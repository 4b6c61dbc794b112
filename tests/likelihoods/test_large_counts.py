"""Expected log likelihoods of counts at any variance of the function, and of large counts in single precision."""

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.likelihoods import Bernoulli, Binomial, NegativeBinomial, Poisson


def expected(likelihood, y, mean, sd):
    """E[log p(y | f)] and mean and variance of y, by 40 001 nodes in double precision."""
    z = torch.linspace(-12.0, 12.0, 40_001, dtype=torch.float64)[:, None]
    weights = torch.exp(-0.5 * z.square())
    weights = weights / weights.sum()
    params = likelihood.params()
    p = likelihood.distribution(mean.double() + sd * z, None if params is None else params.double())
    y_mean = (weights * p.mean).sum(0)
    y_variance = (weights * (p.variance + (p.mean - y_mean).square())).sum(0)
    return (weights * p.log_prob(y.double())).sum(0), y_mean, y_variance


@pytest.mark.parametrize("sd", [0.1, 3.0, 20.0])
@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (Bernoulli(), [0.0, 1.0]),
        (Binomial(10), [0.0, 7.0]),
        (Binomial(10**6), [3.0, 999_000.0]),
        (NegativeBinomial(3.0), [0.0, 40.0]),
    ],
    ids=["bernoulli", "binomial", "large binomial", "negative binomial"],
)
def test_expected_log_likelihoods_at_any_variance(likelihood, y, sd, dtype):
    likelihood, y, mean = likelihood.to(dtype), torch.tensor(y, dtype=dtype), torch.tensor([0.7, -2.0], dtype=dtype)
    variance = torch.full_like(mean, sd**2)
    oracle, y_mean, y_variance = expected(likelihood, y, mean, sd)
    found = likelihood.expected_log_prob(y, mean, variance, likelihood.params())
    rtol = 1e-6 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found.double(), oracle, rtol=rtol, atol=rtol)
    if not isinstance(likelihood, NegativeBinomial):
        for moment, exact in zip(likelihood.moments(mean, variance, None), (y_mean, y_variance), strict=True):
            torch.testing.assert_close(moment.double(), exact, rtol=2e-6 if dtype == torch.float32 else 1e-8, atol=0.0)


@pytest.mark.parametrize(
    ("likelihood", "y", "exact"),
    [
        (Poisson(), 1e7, lambda f: dist.Poisson(f.exp())),
        (Binomial(10**7), 5e6, lambda f: dist.Binomial(torch.tensor(1e7).double(), logits=f)),
        (NegativeBinomial(10.0), 1e7, lambda f: dist.NegativeBinomial(torch.tensor(10.0).double(), logits=f)),
    ],
    ids=["poisson", "binomial", "negative binomial"],
)
def test_large_counts_in_single_precision(likelihood, y, exact):
    y = torch.full((3,), y)
    f = likelihood.inverse_link(y) + torch.tensor([-1e-4, 0.0, 1e-4])
    params = likelihood.params()
    if isinstance(likelihood, NegativeBinomial):
        params = params.detach()
    oracle = exact(f.double()).log_prob(y.double())
    zero = torch.zeros(3)
    torch.testing.assert_close(likelihood.expected_log_prob(y, f, zero, params).double(), oracle, rtol=0.0, atol=1e-3)
    if not isinstance(likelihood, Poisson):  # the rate itself is rounded to single precision
        torch.testing.assert_close(likelihood.distribution(f, params).log_prob(y).double(), oracle, rtol=0.0, atol=1e-3)
