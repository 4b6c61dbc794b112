"""Mini-batches of points and of series."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence

from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import SparseGPVAE
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
    posterior,
)
from tests.models.sparse_gp_vae._forms import every_form

pytestmark = pytest.mark.usefixtures("float64")


@encoded
def test_sums_of_mini_batches_are_unbiased(form):
    """Their average over an epoch is the sum over all data."""
    x, y = data()
    _, guide = make(form, num_data=N)
    guide(x, y)
    whole = guide.condition(x, y)
    parts = []
    for idx in torch.randperm(N).split(2):
        guide.restore(None)
        parts.append(guide.condition(x[idx], y[idx], idx))
    assert_close([torch.stack([getattr(part, name) for part in parts]).mean(0) for name in whole._fields[1:]], whole[1:])


@encoded
def test_mini_batches_with_points_held_out_are_unbiased(form):
    """Their average over all mini-batches is that of the bounds, in closed form, of each q(u) that one makes."""
    x, y = data()
    x, y = x[[0, 1, 2, 5]], y[[0, 1, 2, 5]]  # the second of which nothing is observed
    model = SparseGPVAE(kernel(), nn.Linear(Q, D), torch.linspace(0.0, 1.0, M)[:, None], Gaussian(0.2), num_data=4)
    guide = as_encoded(model, {"u": encoder(form)})
    guide(x, y)
    expected, losses = [], []
    bound = MeanFieldELBO("points", 50_000)
    for told in range(4):
        idx = torch.tensor([told])
        u = posterior(guide, x[idx], y[idx], idx).nodes["u"]["fn"]
        with torch.no_grad():
            guide.condition(x[idx], y[idx], idx)
            mean, scale = function(guide, x, torch.full_like(y, torch.nan))
            guide.restore(None)
            params, W = model.likelihood.params(), model.decoder.weight
            entries = model.likelihood.expected_log_prob(y, model.decoder(mean), scale.square() @ W.square().mT, params)
            prior = dist.MultivariateNormal(torch.zeros(M), torch.eye(M))
            expected.append(kl_divergence(u, prior).sum() - entries.nansum())
        model.held_out = 0.5
        for other in set(range(4)) - {told}:
            idx = torch.tensor([told, other])
            losses.append(bound.loss(model, guide, x[idx], y[idx], idx))
        model.held_out = 0.0
    assert torch.tensor(losses).mean() == pytest.approx(torch.stack(expected).mean().item(), rel=0.002)


def test_mini_batches_of_a_free_form_are_exact():
    x, y = data()
    model, guide = make("free", num_data=N)
    guide(x, y)
    bound = MeanFieldELBO("points", 3000)
    losses = torch.tensor([bound.loss(model, guide, x[idx], y[idx], idx) for idx in torch.arange(N).split(2)])
    assert losses.mean() == pytest.approx(bound.loss(model, guide, x, y), rel=0.01)


@every_form
def test_mini_batches_of_series_are_exact(form):
    x, y = data(4)
    model, guide = make(form, num_data=4)
    guide(x, y)
    bound = MeanFieldELBO("points", 2000)
    losses = torch.tensor([bound.loss(model, guide, x[idx], y[idx], idx) for idx in torch.arange(4).split(2)])
    assert losses.mean() == pytest.approx(bound.loss(model, guide, x, y), rel=0.01)


@every_form
@pytest.mark.parametrize("series", [(), (4,)], ids=["points", "series"])
@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_fit_takes_mini_batches(form, series, held_out):
    model, guide = make(form, num_data=4 if series else N, independent_dim=1, held_out=held_out)
    history = fit(model, guide, *data(*series), loss=MeanFieldELBO("points"), num_steps=5, batch_size=2, progress=False)
    assert len(history.losses) == 5


def test_mini_batches_too_small_to_hold_points_out_are_refused():
    guide = make(num_data=N, held_out=0.3)[1]
    x, y = data()
    with pytest.raises(ValueError, match=r"large enough to hold out a share of 0.3, got 1 points; use a larger"):
        guide(x[:1], y[:1], torch.arange(1))
    with pytest.raises(ValueError, match=r"expected held_out from 0 to below 1, got 1.0"):
        make(held_out=1.0)


def test_mini_batch_without_num_data_is_refused():
    _, guide = make()
    x, y = data()
    with pytest.raises(
        ValueError,
        match=r"expected num_data with mini-batches, got a mini-batch of 2 .*; pass num_data to Sparse",
    ):
        guide(x[:2], y[:2], torch.arange(2))


@encoded
def test_series_of_their_own_points_in_mini_batches(form):
    x, y = data(4)
    _, guide = make(form, torch.rand(4, 1, M, 1), num_data=4)
    guide(x, y)
    idx = torch.tensor([2, 0])
    assert_close(function(guide, x[idx], y[idx], idx), [part[idx] for part in function(guide, x, y)])
