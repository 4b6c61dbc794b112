"""Bounds of mini-batches of series and of points."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.networks import FactorNet
from tests.helpers.structured import B, D, N, Q, make, make_data, make_model
from tests.infer.elbo.structured._bounds import every_estimator, loss_and_slopes

pytestmark = pytest.mark.usefixtures("float64")
BATCHES = (torch.tensor([2, 0]), torch.tensor([3, 1]))


@every_estimator
@pytest.mark.parametrize("shared_inputs", [False, True])
@pytest.mark.parametrize("amortised", [False, True])
def test_mini_batches_of_series_average_to_the_full_bound(estimator, amortised, shared_inputs, fixed_noise):
    model = make_model(num_data=B)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2]) if amortised else None})
    x, y = make_data(B)
    guide(x, y)
    if not amortised:
        guide.locs.f, guide.scales.f = torch.randn(B, 1, Q, N), 0.1 + torch.rand(B, 1, Q, N)
    bound = partial(loss_and_slopes, StructuredELBO(**estimator), model, guide)
    at = (lambda idx: x[0]) if shared_inputs else (lambda idx: x[idx])
    parts = [bound(at(idx), y[idx], idx) for idx in BATCHES]
    assert not torch.allclose(*parts)
    torch.testing.assert_close(sum(parts) / 2, bound(at(slice(None)), y))


@every_estimator
def test_mini_batches_of_points_scale_every_term(estimator, fixed_noise):
    model = make_model(num_data=N, independent_dim=1)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2]), "w": FactorNet(D, 1, [2])})
    x, y = make_data()
    guide(x, y)
    idx = torch.tensor([3, 0])
    found = []
    for args in ((x[idx], y[idx]), (x[idx], y[idx], idx)):
        pyro.set_rng_seed(1)  # for w
        found.append(loss_and_slopes(StructuredELBO(**estimator), model, guide, *args))
    torch.testing.assert_close(found[1], N / 2 * found[0])


@pytest.mark.parametrize(("series", "idx"), [((), [3, 0]), ((B,), [3, 0])], ids=["points", "series"])
def test_global_sites_are_not_scaled(series, idx):
    model = make_model(num_data=6)
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q, 1), 1.0).to_event(2))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2])}, create_plates=model.create_plates)
    x, y = make_data(*series)
    guide(x, y)
    idx = torch.tensor(idx)
    guide_trace = poutine.trace(guide).get_trace(x[idx], y[idx], idx)
    model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(x[idx], y[idx], idx)
    for trace in (guide_trace, model_trace):
        for name, scale in (("likelihood.variance", 1.0), ("kernel.lengthscale", 1.0), ("f", 3.0)):
            assert trace.nodes[name]["scale"] == scale
        assert trace.nodes["kernel.lengthscale"]["value"].shape == (Q, 1)
    assert StructuredELBO().differentiable_loss(model, guide, x[idx], y[idx], idx).isfinite()


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_mini_batches_need_the_number_of_data(series):
    model, guide, x, y = make(*series)
    idx = torch.tensor([3, 0])
    with pytest.raises(
        ValueError,
        match="with mini-batches, got a mini-batch of 2 and num_data=None; pass num_data to GPVAE",
    ):
        StructuredELBO().loss(model, guide, x[idx], y[idx], idx)
