"""Inducing points, inputs and kernels, shared or of each series."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.kernels import RBF, Matern, Stack
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from tests.helpers.sparse_processes import B, D, M, N, Q, assert_close, data, encoded, encoder, function, make

pytestmark = pytest.mark.usefixtures("float64")


@encoded
@pytest.mark.parametrize("lead", [(), (Q,), (B, 1), (B, Q)], ids=["shared", "latents", "series", "both"])
def test_inducing_points_shared_or_not(form, lead):
    """Equal points give equal posteriors, however many copies there are."""
    Z = torch.linspace(0.0, 1.0, M)[:, None]
    args = data(B)
    model, guide = make(form, Z)
    own_model, own = make(form, Z.expand(*lead, M, 1))
    own.encoders.u, own_model.kernel = guide.encoders.u, model.kernel
    if form != "projected":  # the order of neighbours is that of each process
        guide.encoders.u.num_nearest = M
    assert_close(function(own, *args), function(guide, *args))
    loss = MeanFieldELBO("points").differentiable_loss(own_model, own, *args)
    assert torch.autograd.grad(loss, own_model.inducing_points_unconstrained)[0].shape == (*lead, M, 1)


@encoded
def test_other_sites_start_where_they_are_told(form):
    model, _ = make()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.5, 1.0))
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder(form)}, init_loc_fn=lambda site: torch.tensor(3.0))
    args = data()
    guide(*args)
    torch.testing.assert_close(guide.median(*args)["likelihood.variance"], torch.tensor(3.0))


@encoded
def test_inputs_shared_by_all_series(form):
    model, guide = make(form)
    x, y = data(B)
    assert_close(function(guide, x[0], y), function(guide, x[:1].expand(B, -1, -1), y))
    assert model.predict(guide, x[0], y, num_samples=4).mean.shape == (B, N, D)


def test_stacked_kernels():
    model = SparseGPVAE(Stack(RBF(1), Matern(1, 0.5)), MLP(2, D), torch.rand(M, 1))
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2)})
    assert function(guide, *data(B))[0].shape == (B, N, 2)
