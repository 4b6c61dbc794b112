"""Moments, draws and quantiles of predictions."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import IndexNet
from tests.helpers.sparse_processes import (
    D,
    M,
    N,
    Q,
    as_encoded,
    assert_close,
    data,
    encoded,
    encoder,
    function,
    kernel,
    make,
    one_and_several,
)
from tests.models.sparse_gp_vae._forms import every_form

pytestmark = pytest.mark.usefixtures("float64")


@encoded
@one_and_several
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("independent_dim", [0, 1])
def test_predictions_have_the_moments_of_a_linear_model(form, series, joint, independent_dim):
    model = SparseGPVAE(kernel(), nn.Linear(Q + independent_dim, D), torch.rand(M, 1), independent_dim=independent_dim)
    own = {"w": IndexNet(D, independent_dim)} if independent_dim else {}
    guide = as_encoded(model, {"u": encoder(form), **own})
    x, y = data(*series)
    x_new = torch.rand(*series, 3, 1)
    both, nothing = torch.cat([x, x_new], -2), torch.full((*series, 3, D), torch.nan)
    mean, scale = (part[..., N:, :] for part in function(guide, both, torch.cat([y, nothing], -2)))
    W = model.decoder.weight.detach()
    predicted = model.predict(guide, x, y, x_new, num_samples=20_000, joint=joint)
    variance = scale.square() @ W[:, :Q].mT.square() + model.likelihood.variance + W[:, Q:].square().sum(-1)
    torch.testing.assert_close(predicted.mean, mean @ W[:, :Q].mT + model.decoder.bias, atol=0.05, rtol=0.0)
    torch.testing.assert_close(predicted.variance, variance, atol=0.0, rtol=0.05)


@one_and_several
@pytest.mark.parametrize("inputs", ["data", "new", "shared"])
def test_joint_draws_have_the_covariance_of_the_process_between_points(series, inputs):
    """The dense process's given the same sites on the inducing values, where these say little and where they say all."""
    model = SparseGPVAE(kernel(), nn.Linear(Q, D), torch.linspace(0.0, 0.5, M)[:, None])
    guide = as_encoded(model, {"u": encoder("projected")})
    x, y = data(*series)
    x_new = {"data": None, "new": 2.0 * torch.rand(*series, 4, 1), "shared": torch.linspace(0.1, 2.0, 4)[:, None]}[inputs]
    at = x if x_new is None else x_new
    u = poutine.trace(guide).get_trace(x, y).nodes["u"]["fn"]
    draws = 20_000
    found = model.predict(guide, x, y, x_new, num_samples=draws, joint=True).parts[0].mean
    found = (found - model.decoder.bias).detach() @ torch.linalg.pinv(model.decoder.weight.detach().mT)
    A = model.process(at).A
    A = A.squeeze(-4) if A.dim() > 3 else A
    covariance = model.kernel(at.unsqueeze(-3)) + A.mT @ (u.covariance_matrix - torch.eye(M)) @ A
    mean = (u.mean.unsqueeze(-2) @ A).squeeze(-2)
    centred = found.mT - mean
    sampled = torch.einsum("s...i,s...j->...ij", centred, centred) / draws
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    error = ((variance[..., None] * variance[..., None, :] + covariance.square()) / draws).sqrt()
    assert ((sampled - covariance).abs() < 4.5 * error + 1e-4).all()


@one_and_several
def test_impute_and_forecast(series):
    model, guide = make()
    x, y = data(*series)
    x = torch.linspace(0.0, 1.0, N)[:, None].expand_as(x)
    filled = model.impute(guide, x, y, num_samples=5)
    seen = ~torch.isnan(y)
    assert torch.equal(filled.mean[seen], y[seen])
    assert (filled.variance[~seen] > 0.0).all()
    assert model.forecast(guide, x, y, 4, num_samples=5).mean.shape == (*series, 4, D)


@every_form
def test_quantiles_are_those_of_the_marginals(form):
    _, guide = make(form)
    x, y = data()
    with pytest.raises(ValueError, match="no parameters before its first call"):
        guide.median(x, y)
    mean, scale = function(guide, x, y)
    low, middle = guide.quantiles([0.1, 0.5], x, y)["f"]
    assert_close((low, middle), (dist.Normal(mean, scale).icdf(torch.tensor(0.1)), mean))
    assert guide.median(x, y)["u"].shape == (Q, M)
