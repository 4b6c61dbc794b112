"""The guide's data among the arguments of the model."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet
from tests.guides.structured._models import first_call
from tests.helpers.structured import N

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.usefixtures("unchecked")
def test_data_are_found_or_asked_for():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, 1))
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    with pytest.raises(TypeError, match=r"expected data by position.*\['y'\]"):
        StructuredGPGuide(model, encoders={"f": IndexNet(1, 2)})(t, y=y)
    with pytest.raises(TypeError, match=r"expected data of a floating-point dtype, got torch.int64; use y.to"):
        StructuredGPGuide(model, encoders={"f": IndexNet(1, 2)})(t, y.long())


def one_output(t, y=None):
    """A process seen with noise, or data drawn from it: as many outputs as inputs, of which each can pass for the other."""
    f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
    with pyro.plate("points", len(t)):
        return pyro.sample("y", dist.Normal(f, 0.1), obs=None if y is None else y.squeeze(-1))


@pytest.mark.parametrize("encoder", [FactorNet(1, 1, [2]), None], ids=["encoder", "free"])
def test_inputs_are_not_taken_for_data_where_these_are_left_out(encoder):
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    guide = StructuredGPGuide(one_output, encoders={"f": encoder and encoder.double()})
    guide(t, y)
    draws = Predictive(one_output, guide=guide, num_samples=2, return_sites=["f"])
    for run in (guide, guide.median, draws):
        with pytest.raises(ValueError, match=r"expected data as argument 1 of the model, as at .* got .* as argument 0"):
            run(t)
    assert draws(t, y)["f"].shape == (2, 1, N)


def test_data_refused_at_the_first_call_can_be_mended():
    t, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(N, 1)
    guide = StructuredGPGuide(one_output, encoders={"f": FactorNet(1, 1, [2])})
    with pytest.raises(ValueError, match="a single output needs"):
        guide(t, y[:, 0])
    assert guide(t, y)["f"].shape == (N,)
    assert math.isfinite(StructuredELBO().loss(one_output, guide, t, y))


def test_a_column_of_whole_numbers_is_not_taken_for_indices():
    def counts_of_one(t, counts):
        f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
        with pyro.plate("points", len(t)):
            pyro.sample("counts", dist.Poisson(f.exp()), obs=counts)

    guide = StructuredGPGuide(counts_of_one, encoders={"f": FactorNet(1, 1, [2])})
    with pytest.raises(TypeError, match=r"expected data of a floating-point dtype, got torch.int64 of shape \[5\], which is"):
        guide(torch.linspace(0.0, 1.0, N)[:, None], torch.arange(N) % 2)


@pytest.mark.parametrize("make_encoder", [lambda: None, lambda: FactorNet(1, 1)])
def test_data_must_be_there_and_have_columns(make_encoder):
    def model(t, y=None):
        pyro.sample("f", GaussianProcess(RBF(1), torch.rand(N, 1)))

    with pytest.raises(ValueError, match=r"expected data among the arguments of the model, got \['Tensor'\]; pass y"):
        first_call({"f": make_encoder()}, torch.arange(N), model=model)
    with pytest.raises(
        ValueError, match=r"expected data \[..., points, outputs\], got \[5\]; a single output needs \[:, None\]"
    ):
        first_call({"f": make_encoder()}, torch.arange(N), torch.randn(N), model=model)
