"""Priors on the parameters of the kernel."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroSample
from pyro.optim import Adam
from torch import nn

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import IndexNet
from tests.helpers.sparse_processes import D, M, Q, data, encoded, make, one_and_several

pytestmark = pytest.mark.usefixtures("float64")


@encoded
@one_and_several
def test_priors_on_parameters_of_the_kernel(form, series):
    model, guide = make(form)
    model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 0.3).expand([Q, 1]).to_event(2))
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 0.3))
    x, y = data(*series)
    for bound in (MeanFieldELBO("points"), StructuredELBO(num_particles=3), Trace_ELBO()):
        assert torch.isfinite(torch.tensor(SVI(model, guide, Adam({"lr": 0.01}), bound).step(x, y)))
    assert model.predict(guide, x, y, x[..., :2, :], num_samples=3).mean.shape == (*series, 2, D)
    assert guide.condition(x, y).precision.shape == (*series, Q, M, M)


def test_prediction_wants_the_guide_to_know_the_kernel():
    t, y = torch.linspace(0.0, 1.0, 8)[:, None], torch.randn(8, 2)
    model = SparseGPVAE(RBF(1), nn.Linear(1, 2), t[::2])
    model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([1]).to_event(1))
    known = poutine.condition(model, {"kernel.lengthscale": torch.tensor([0.3])})
    guide = SparseStructuredGPGuide(known, encoders={"u": IndexNet(2, 1)}, given=("f",))
    guide(t, y)
    for joint in (False, True):
        with pytest.raises(ValueError, match=r"got one without \['kernel.lengthscale'\]"):
            model.predict(guide, t, y, joint=joint)
