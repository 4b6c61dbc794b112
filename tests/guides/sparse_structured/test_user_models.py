"""Guides of models of a user's own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroParam
from pyro.optim import Adam

from pyro_lvgp.distributions import SparseProcess
from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.networks import IndexNet, replace_parameter
from tests.helpers.sparse_processes import D, M, N, encoded, told_to_points

pytestmark = pytest.mark.usefixtures("float64")


class Counts(PyroModule):
    """Spikes of three neurons with one rate, without infer dicts or our names."""

    def __init__(self):
        super().__init__()
        self.kernel = RBF(1, lengthscale=0.2, batch_shape=(1,))
        self.inducing_points = PyroParam(torch.linspace(0.0, 1.0, M)[:, None])

    def place_inducing_points(self, inducing_points):
        replace_parameter(self, "inducing_points", inducing_points)

    def forward(self, t, counts):
        gain = pyro.sample("gain", dist.LogNormal(torch.zeros(D), 1.0).to_event(1))
        process = SparseProcess(self.kernel, self.inducing_points, t[None])
        with pyro.plate("rates", 1, dim=-1):
            v = pyro.sample("v", process.prior().to_event(1))
        mean, variance = process.marginals(v)
        with pyro.plate("bins", len(t), dim=-1):
            rate = pyro.sample("rate", dist.Normal(mean.mT, variance.mT.sqrt()).to_event(1))
            expected = rate.exp() * gain
            pyro.sample("counts", dist.Poisson(expected).to_event(1), obs=counts)


@encoded
def test_a_model_of_ones_own(form):
    model = Counts()
    t = torch.linspace(0.0, 1.0, N)[:, None]
    counts = torch.poisson(2.0 * torch.sin(6.0 * t).exp().expand(-1, D))
    net = told_to_points(form, IndexNet(D, 1), 1, num_nearest=2)
    guide = SparseStructuredGPGuide(model, encoders={"v": net}, given=["rate"])
    svi = SVI(model, guide, Adam({"lr": 0.02}), TraceMeanField_ELBO())
    losses = [svi.step(t, counts) for _ in range(100)]
    assert sum(losses[-20:]) < sum(losses[:20])
    assert guide.median(t, counts)["gain"].shape == (D,)
    assert guide.condition(t, counts, inducing_points=torch.rand(3, 1)).precision.shape == (1, 3, 3)
    assert guide(t, counts)["v"].shape == (1, 3)


class Two(PyroModule):
    """Two sites of inducing values, whose points have names of their own."""

    def __init__(self):
        super().__init__()
        self.kernel, self.places = RBF(1, lengthscale=0.2, batch_shape=(1,)), torch.linspace(0.0, 1.0, M)[:, None]

    def forward(self, t, y):
        process = SparseProcess(self.kernel, self.places, t[None])
        for name in ("a", "b"):
            with pyro.plate(f"{name}s", 1, dim=-1):
                v = pyro.sample(name, process.prior().to_event(1))
        mean, variance = process.marginals(v)
        with pyro.plate("points", len(t), dim=-1):
            f = pyro.sample("f", dist.Normal(mean.mT, variance.mT.sqrt()).to_event(1))
            pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("sites", [["a"], ["a", "b"]])
def test_only_models_of_one_process_with_its_points_can_be_conditioned(sites):
    guide = SparseStructuredGPGuide(Two(), encoders={name: IndexNet(1, 1) for name in sites}, given=["f"])
    t = torch.linspace(0.0, 1.0, N)[:, None]
    guide(t, t)
    with pytest.raises(ValueError, match=r"expected a model with one site of inducing values.*got \['a'.* in Two"):
        guide.condition(t, t)
