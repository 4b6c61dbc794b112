"""Priors on kernel, likelihood and decoder."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_lvgp.guides import MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF, Matern, Stack
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import FactorNet
from tests.models.gp_vae._models import D, N, one_and_several

pytestmark = pytest.mark.usefixtures("float64")


class Scaled(PyroModule):
    """A decoder with a prior on its scale."""

    def __init__(self):
        super().__init__()
        self.scale = PyroSample(dist.LogNormal(0.0, 1.0))
        self.net = nn.Linear(2, D)

    def forward(self, latents):
        return self.scale * self.net(latents)


@one_and_several
def test_priors_on_kernel_likelihood_and_decoder_are_shared(series):
    """By all series and points; a mean-field guide works too."""
    model = GPVAE(RBF(1, batch_shape=(2,)), Scaled())
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2, 1), 1.0).to_event(2))
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    x, y = torch.rand(*series, N, 1), torch.randn(*series, N, D)
    shapes = {"kernel.lengthscale": (2, 1), "likelihood.variance": (), "decoder.scale": ()}
    for guide in (StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)}), MeanFieldGuide(model)):
        values = guide(x, y)
        trace = poutine.trace(poutine.condition(model, {"f": values["f"]})).get_trace(x, y)
        for name, shape in shapes.items():
            assert values[name].shape == trace.nodes[name]["value"].shape == shape
            assert not trace.nodes[name]["cond_indep_stack"]
        assert math.isfinite(Trace_ELBO().loss(model, guide, x, y))


@one_and_several
@pytest.mark.parametrize("make_kernel", [lambda k: k, lambda k: k + 0.5 * RBF(1, batch_shape=(1,)), Stack])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_draws_of_a_kernel_without_a_batch_of_processes_are_refused(series, make_kernel, sparse):
    """They would be taken for processes; a single draw is in no place, and with a batch of one kernel they lie left of it."""

    def bounds(*batch_shape):
        pyro.clear_param_store()
        kernel = Matern(1, batch_shape=batch_shape)
        kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(*batch_shape, 1), 0.1).to_event(1 + len(batch_shape)))
        if sparse:
            model = SparseGPVAE(make_kernel(kernel), nn.Linear(1, D), torch.rand(3, 1))
            guide = SparseStructuredGPGuide(model, encoders={"u": FactorNet(D, 1)})
        else:
            model = GPVAE(make_kernel(kernel), nn.Linear(1, D))
            guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)})
        x, y = torch.rand(*series, N, 1), torch.randn(*series, N, D)
        yield Trace_ELBO().loss(model, guide, x, y)
        yield Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=2).loss(model, guide, x, y)

    assert math.isfinite(next(bounds()))
    with pytest.raises(ValueError, match=r"expected a kernel with a batch dimension .* make it with batch_shape=\(1,\)"):
        list(bounds())
    assert all(map(math.isfinite, bounds(1)))
