"""Conditioning on a stream of data."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import FactorNet, IndexNet
from tests.helpers.sparse_processes import (
    D,
    M,
    Q,
    as_encoded,
    assert_close,
    data,
    encoded,
    function,
    make,
    one_and_several,
    posterior,
)

pytestmark = pytest.mark.usefixtures("float64")


@encoded
@one_and_several
def test_conditioning_in_pieces_is_conditioning_at_once(form, series):
    _, guide = make(form)
    x, y = data(*series, num_data=20)
    x_new, nothing = torch.rand(*series, 4, 1), torch.full((*series, 4, D), torch.nan)
    guide(x, y)
    whole = guide.condition(x, y)
    at_once = function(guide, x_new, nothing)
    guide.restore(None)
    for piece in torch.arange(20).split(2):
        pieces = guide.condition(x[..., piece, :], y[..., piece, :])
    assert_close(pieces, whole)
    assert_close(function(guide, x_new, nothing), at_once)
    guide.restore(None)
    expected = function(guide, torch.cat([x, x_new], -2), torch.cat([y, nothing], -2))
    assert_close(at_once, [part[..., 20:, :] for part in expected])


@encoded
@one_and_several
def test_more_inducing_points_keep_the_posterior(form, series):
    model, guide = make(form)
    x, y = data(*series)
    nothing = torch.full_like(y, torch.nan)
    guide(x, y)
    guide.condition(x, y)
    before, Z = function(guide, x, nothing), model.inducing_points.detach()
    guide.condition(x, nothing, inducing_points=torch.cat([Z, torch.rand(3, 1)]))
    assert model.inducing_points.shape == (M + 3, 1)
    assert_close(function(guide, x, nothing), before, atol=1e-6)
    guide.condition(x, nothing, inducing_points=Z)
    assert_close(function(guide, x, nothing), before, atol=1e-6)


@pytest.mark.parametrize("moved", [False, True])
def test_other_series_than_those_remembered_change_nothing(moved):
    model, guide = make()
    x, y = data(3)
    guide(x, y)
    memory, Z = guide.condition(x, y), model.inducing_points.detach().clone()
    for part in (0, slice(0, 1), slice(0, 2)):
        with pytest.raises(ValueError, match="expected the 3 series of the guide's memory"):
            guide.condition(x[part], y[part], inducing_points=Z + 0.5 if moved else None)
    assert guide.memory is memory
    assert torch.equal(model.inducing_points, Z)


def test_a_stream_moves_on_with_its_inducing_points():
    """Points added where new data come; in the end as good as if all had been there from the first."""
    _, guide = make()
    x = torch.linspace(0.0, 4.0, 80)[:, None]
    y = torch.sin(3.0 * x) + torch.zeros(D)
    guide(x[:20], y[:20])
    Z = torch.linspace(0.0, 4.0, 41)[:, None]
    for k in range(4):
        guide.condition(x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20], inducing_points=Z[: 10 * k + 11])
    streamed = function(guide, x, torch.full_like(y, torch.nan))
    guide.restore(None)
    assert_close(streamed, function(guide, x, y), atol=0.02)


def test_many_sharp_sites_in_single_precision():
    """Rounding of what they say is more than the prior; where they say nothing, the prior is left."""
    x, x_new = 10.0 * torch.rand(5000, 1), torch.linspace(-2.0, 14.0, 50)[:, None]
    y = torch.sin(x + torch.arange(D))
    inputs, values = torch.cat([x, x_new]), torch.cat([y, torch.full((50, D), torch.nan)])
    model = SparseGPVAE(RBF(1, batch_shape=(Q,)), nn.Linear(Q, D), torch.linspace(0.0, 12.0, 30)[:, None])
    guide = as_encoded(model, {"u": IndexNet(D, Q, init_scale=0.003)})

    def moments(dtype):
        for module in (model, guide):
            module.to(dtype)
        return [part.double() for part in function(guide, inputs.to(dtype), values.to(dtype))]

    (mean, scale), (found, found_scale) = moments(torch.float64), moments(torch.float32)
    assert scale.min() < 0.005 < 0.9 < scale.max()
    assert ((found - mean).abs() < 0.1 * scale).all()
    torch.testing.assert_close(found_scale, scale, rtol=0.1, atol=0.0)


def test_streams_of_sharp_sites_in_single_precision():
    """Ten pieces, each with inducing points added: the posterior of double precision."""
    kernel = Matern(1, 2.5, lengthscale=4.0, batch_shape=(Q,))
    x = torch.linspace(0.0, 20.0, 400)[:, None]
    y = torch.sin(x + torch.arange(D))
    model = SparseGPVAE(kernel, nn.Linear(Q, D), x[:2])
    guide = as_encoded(model, {"u": IndexNet(D, Q, init_scale=0.01)})

    def streamed(dtype):
        for module in (model, guide):
            module.to(dtype)
        guide.restore(None)
        for k, piece in enumerate(torch.arange(400).split(40)):
            Z = 0.25 * torch.arange(8 * (k + 1) + 1, dtype=dtype)[:, None]
            guide(x[piece].to(dtype), y[piece].to(dtype))
            guide.condition(x[piece].to(dtype), y[piece].to(dtype), inducing_points=Z)
        return [part.double() for part in function(guide, x.to(dtype), torch.full_like(y, torch.nan, dtype=dtype))]

    (mean, scale), (found, found_scale) = streamed(torch.float64), streamed(torch.float32)
    assert scale.max() < 0.01
    assert ((found - mean).abs() < 0.05 * scale).all()
    torch.testing.assert_close(found_scale, scale, rtol=0.05, atol=0.0)


def test_memory_joins_new_data():
    _, guide = make()
    x, y = data()
    guide(x, y)
    expected = function(guide, x, y)
    nothing = y.clone()
    nothing[:4] = torch.nan
    guide.condition(x[:4], y[:4])
    assert_close(function(guide, x, nothing), expected)


def test_no_encoder_is_a_free_posterior():
    model, x, y = make(independent_dim=1)[0], *data()
    names = []
    for sites in ({"u": None}, {}):
        pyro.clear_param_store()
        guide = as_encoded(model, sites | {"w": IndexNet(D, 1)})
        assert isinstance(posterior(guide, x, y).nodes["u"]["fn"], dist.MultivariateNormal)
        names.append([name for name, _ in guide.named_parameters()])
    assert names[0] == names[1]


def test_data_are_taken_in_in_evaluation_mode():
    (x, y), dropout = data(), nn.Dropout(0.5)
    model, _ = make()
    guide = as_encoded(model, {"u": nn.Sequential(dropout, FactorNet(D, Q))})
    guide(x, y)
    in_training, guide.memory = guide.condition(x, y), None
    assert dropout.training
    guide.eval()
    torch.testing.assert_close(in_training, guide.condition(x, y))


def test_a_free_posterior_cannot_be_conditioned():
    _, guide = make("free")
    x, y = data()
    guide(x, y)
    with pytest.raises(ValueError, match=r"expected an encoder for the inducing values, got a free q\(u\)"):
        guide.condition(x, y)
