"""Training under every likelihood."""

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive, TraceMeanField_ELBO
from pyro.nn import PyroSample

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.likelihoods import Bernoulli, Binomial, Gaussian, LogNormal, NegativeBinomial, Poisson, StudentT
from tests.helpers.particles import assert_particles_are_those_one_by_one
from tests.models.gplvm._models import D, N, Q, make_model, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def test_priors_on_hyperparameters_with_and_without_vectorised_particles(Y):
    model = make_model()
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q), 0.3).to_event(1))
    model.kernel.variance = PyroSample(dist.LogNormal(0.0, 0.3))
    model.likelihood.variance = PyroSample(dist.LogNormal(-1.0, 0.3))
    guide = MeanFieldGuide(model)
    guide(Y)
    assert_particles_are_those_one_by_one(model, guide, Y)
    assert set(guide.median()) == {"kernel.lengthscale", "kernel.variance", "likelihood.variance", "u", "X"}


@pytest.mark.parametrize(
    "likelihood",
    [Bernoulli(), Poisson(), NegativeBinomial(), Binomial(4), Gaussian(), LogNormal(), StudentT()],
    ids=lambda x: type(x).__name__,
)
def test_every_likelihood_trains_with_holes(likelihood, dtype):
    torch.set_default_dtype(dtype)
    likelihood = likelihood.to(dtype)
    Y = with_holes(likelihood(torch.randn(N, D)).sample())
    model = make_model(likelihood=likelihood).initialize(Y)
    guide = MeanFieldGuide(model)
    loss = TraceMeanField_ELBO()(model, guide)
    value = loss(Y)
    value.backward()
    assert value.dtype == dtype
    for name, parameter in loss.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert Predictive(model, guide=guide, num_samples=3)(None)["y"].shape == (3, N, D)
    assert model.reconstruct(guide, Y, num_samples=2).mean.dtype == dtype
