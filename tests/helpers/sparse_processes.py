"""Data, encoders and models of sparse processes."""

import pytest
import torch
from pyro import poutine

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer.elbo.handlers import EvaluateBound
from pyro_lvgp.kernels import Matern
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, NeighbourNet, OffsetNet

N, M, D, Q, B = 8, 5, 3, 2, 3


def kernel():
    return Matern(1, lengthscale=torch.tensor([[0.3], [0.6]]), variance=torch.tensor([1.2, 0.8]), batch_shape=(Q,))


def data(*series, num_data=N):
    """With holes, and a row of them."""
    x, y = torch.rand(*series, num_data, 1).sort(-2).values, torch.randn(*series, num_data, D)
    y[..., 1:2, :] = torch.nan
    y[..., 2:, 0] = torch.nan
    return x, y


def make(form="projected", Z=None, **options):
    """A model with a nonlinear decoder, and a guide."""
    latents = Q + options.get("independent_dim", 0)
    Z = torch.linspace(0.0, 1.0, M)[:, None] if Z is None else Z
    model = SparseGPVAE(kernel(), MLP(latents, D, (5,)), Z, **options)
    return model, as_encoded(model, {"u": encoder(form)})


def as_encoded(model, encoders, **options):
    """A guide whose sites are those of the encoders in evaluation mode too."""
    return SparseStructuredGPGuide(model, encoders=encoders, num_eval_site_updates=0, **options)


def encoder(form):
    if form == "nearest":
        return OffsetNet(FactorNet(D, 4), 4, input_dim=1, latent_dim=Q, num_nearest=3)
    if form == "neighbours":
        return stirred(NeighbourNet(FactorNet(D, Q), input_dim=1, latent_dim=Q, num_nearest=3))
    return IndexNet(D, Q) if form == "projected" else None


def stirred(net):
    """Away from its start, where the network says nothing."""
    for parameter in net.net[-1].parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def told_to_points(form, net, latent_dim, **sizes):
    """An encoder of sites on f, told to the inducing points as the form has it."""
    if form == "projected":
        return net
    sizes |= {"input_dim": 1, "latent_dim": latent_dim}
    return NeighbourNet(net, **sizes) if form == "neighbours" else OffsetNet(net, latent_dim, init_scale=0.01, **sizes)


def posterior(guide, *args):
    """Trace of the guide with u integrated out: the fn of f are its marginals."""
    with EvaluateBound(marginalize=True):
        return poutine.trace(guide).get_trace(*args)


def function(guide, *args):
    """Marginal mean and standard deviation of f [*series, N, Q]."""
    fn = posterior(guide, *args).nodes["f"]["fn"]
    return fn.base_dist.loc, fn.base_dist.scale


def assert_close(got, expected, atol=1e-8):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0.0)


ENCODED = ["nearest", "neighbours", "projected"]
encoded = pytest.mark.parametrize("form", ENCODED)
one_and_several = pytest.mark.parametrize("series", [(), (B,)], ids=["one series", "several"])
