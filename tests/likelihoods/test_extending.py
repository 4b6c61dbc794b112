"""Likelihoods called by themselves, and likelihoods of users."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam

from pyro_lvgp.likelihoods import Gaussian, Likelihood, LogConcaveLikelihood, Logistic, Ordinal, Poisson
from tests.helpers.abstract import missing_methods


def test_likelihoods_on_their_own_do_not_share_parameters():
    f = torch.zeros(3, 1)
    Gaussian(0.1)(f)
    torch.testing.assert_close(Gaussian(1.0)(f).variance, torch.ones(3, 1))
    for levels in (3, 5):
        likelihood = Ordinal.from_data(torch.arange(levels * 1.0)[:, None])
        assert likelihood(f).probs.shape == (3, 1, levels)
    assert not list(pyro.get_param_store().keys())


def test_svi_trains_a_likelihood_in_a_plain_function():
    likelihood, y = Gaussian(1.0), 1.5 * torch.randn(50, 1)

    def model():
        pyro.sample("y", likelihood(torch.zeros(50, 1)).to_event(2), obs=y)

    svi = SVI(model, lambda: None, Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(150):
        svi.step()
    torch.testing.assert_close(likelihood.variance.detach(), y.square().mean(), rtol=0.1, atol=0.0)


@pytest.mark.parametrize(
    ("base", "missing"),
    [
        (Likelihood, "distribution, inverse_link"),
        (LogConcaveLikelihood, "distribution, inverse_link, log_prob_derivatives"),
        (Logistic, "distribution, exponents, inverse_link"),
    ],
)
def test_a_likelihood_must_implement_its_methods(base, missing):
    cls = type("Mine", (base,), {})
    with pytest.raises(TypeError, match=f"abstract class Mine .*{missing_methods(missing)}"):
        cls()


def test_a_log_concave_likelihood_of_a_user_keeps_its_digits():
    class Mine(LogConcaveLikelihood):
        distribution, inverse_link = Poisson.distribution, Poisson.inverse_link
        log_prob_derivatives = Poisson.log_prob_derivatives

    y, mean, variance = torch.tensor([500.0]), torch.zeros(1), torch.tensor([9.0])
    expected = Poisson().log_predictive_density(y, mean, variance, None)
    assert torch.equal(Mine().log_predictive_density(y, mean, variance, None), expected)
    f = torch.linspace(-15.0, 15.0, 100_001, dtype=torch.float64)
    joint = dist.Poisson(f.exp()).log_prob(y.double()) + dist.Normal(0.0, 3.0).log_prob(f)
    torch.testing.assert_close(expected.double(), (joint.logsumexp(0) + (f[1] - f[0]).log())[None], rtol=1e-4, atol=0.0)
