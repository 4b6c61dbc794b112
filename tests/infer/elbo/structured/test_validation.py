"""Errors of the structured bound."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, IndexNet
from tests.helpers.structured import B, D, N, Q, make, make_data

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("value", ["semi-analytic", "doubly-stochastic"])
def test_a_process_has_one_scale_in_model_and_guide(value):
    model, guide, x, y = make(B)
    bound = StructuredELBO(value=value, max_plate_nesting=2)
    with pytest.raises(ValueError, match=r"one scale of 'f'.*got 0.1 and 1.0: wrap the guide"):
        bound.loss(poutine.scale(model, scale=0.1), guide, x, y)
    bound.loss(poutine.scale(model, scale=0.1), poutine.scale(guide, scale=0.1), x, y)


@pytest.mark.parametrize("value", ["semi-analytic", "doubly-stochastic"])
def test_a_guide_of_another_model_is_refused(value):
    _, guide, x, y = make()
    kernel = RBF(1, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(Q,))
    other = GPVAE(kernel, MLP(Q, D, [3], nn.Tanh), Gaussian(0.4))
    with pytest.raises(ValueError, match="posterior of 'f' to be made of the model's prior, got one of another"):
        StructuredELBO(value=value).loss(other, guide, x, y)


def test_a_model_that_pairs_draws_of_one_particle_with_those_of_others_is_refused():
    def model(x, y):
        gain = pyro.sample("gain", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(RBF(1), x))
        with pyro.plate("points", len(x)):
            # gain [S, 1] times f [S, N] would do: one dimension too many makes [S, S, N] of them.
            pyro.sample("y", dist.Normal(gain[..., None] * f, 1.0), obs=y[:, 0])

    x, y = make_data()
    y = torch.nan_to_num(y)
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 1)})
    assert math.isfinite(StructuredELBO(max_plate_nesting=1).loss(model, guide, x, y))
    with pytest.raises(ValueError, match='at site "y", invalid log_prob shape'):
        StructuredELBO(num_particles=3, max_plate_nesting=1).loss(model, guide, x, y)


def test_latents_that_pair_particles_are_refused():
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)

    def model(t, y):
        f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
        with pyro.plate("points", N):
            z = pyro.sample("z", dist.Normal(f, 0.5))  # [particles, 1, N] beside [particles, N]
            pyro.sample("y", dist.Normal(z, 0.5), obs=y[:, 0])

    guide = StructuredGPGuide(model, encoders={"f": None})
    guide(t, y)
    with pytest.raises(ValueError, match="at site"):
        StructuredELBO(num_particles=10, max_plate_nesting=1).loss(model, guide, t, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": "exact"}, "expected value in .*semi-analytic.* and gradient_estimator in .*, got 'exact' and 'path'"),
        ({"gradient_estimator": "reinforce"}, "got 'semi-analytic' and 'reinforce'"),
        ({"num_particles": 0}, "expected num_particles of 1 or more, got 0"),
    ],
)
def test_estimators_that_make_no_sense(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        StructuredELBO(**options)


def test_guides_that_cannot_be_reparameterised():
    def model(y):
        pyro.sample("k", dist.Poisson(torch.tensor(1.0)))

    with pytest.raises(ValueError, match="'k' with Poisson; use a distribution with has_rsample"):
        StructuredELBO().loss(model, model, torch.zeros(1))
