"""Fits with gaps and on mini-batches of series."""

import pytest
import torch
from torch import nn

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import JointAdam, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian, LogNormal
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import FactorNet
from tests.models.gp_vae._models import NOISE, B, D, N, make_linear

pytestmark = pytest.mark.usefixtures("float64")


def test_positive_data_with_gaps():
    """A log-normal likelihood is the Gaussian one of the logarithms, encoder aside."""
    model = GPVAE(RBF(1, batch_shape=(2,)), nn.Linear(2, D), LogNormal(NOISE))
    x, y = torch.rand(N, 1), torch.randn(N, D)
    y[2:4, 1] = torch.nan
    in_logarithms = GPVAE(model.kernel, model.decoder, Gaussian(NOISE))
    guide = StructuredGPGuide(model)
    guide(x, y.exp())
    bounds, predicted = [], []
    for each, data in ((model, y.exp()), (in_logarithms, y)):
        guide._model = (each,)
        torch.manual_seed(1)
        bound = StructuredELBO(num_particles=5, max_plate_nesting=1).differentiable_loss(each, guide, x, data)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(bound, list(model.decoder.parameters())))
        bounds.append(-bound)
        torch.manual_seed(2)
        predicted.append(each.predict(guide, x, data).log_prob(data))
    torch.testing.assert_close(bounds[0], bounds[1] - y.nansum())
    torch.testing.assert_close(predicted[0], predicted[1] - y, equal_nan=True)
    filled = model.impute(guide, x, y.exp())
    assert (filled.mean > 0.0).all()
    assert (filled.stddev[2:4, 1] > 0.0).all()
    torch.testing.assert_close(filled.stddev.square(), filled.variance)


def test_fit_on_mini_batches_of_series():
    model, x, y = make_linear(1, 9, num_data=9)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1, [8])})
    elbo = StructuredELBO(num_particles=200, max_plate_nesting=2)
    before = elbo.loss(model, guide, x, y)
    how = {"optim": JointAdam(lr=0.05), "progress": False}
    history = fit(model, guide, x, y, loss=StructuredELBO(), batch_size=3, num_steps=30, **how)
    assert history.num_entries == (~torch.isnan(y)).sum()
    assert elbo.loss(model, guide, x, y) < before - 10.0


@pytest.mark.parametrize("shared", [False, True])
def test_fit_takes_mini_batches_of_series_and_leaves_shared_inputs_whole(shared):
    model, x, y = make_linear(1, B, num_data=B)
    x = x[0] if shared else x
    calls = []
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)})
    fit(model, lambda *args: calls.append(args) or guide(*args), x, y, num_steps=B, batch_size=1, progress=False)
    for inputs, batch, idx in calls[-B:]:
        assert torch.equal(inputs, x if shared else x[idx])
        torch.testing.assert_close(batch, y[idx], equal_nan=True)


def test_mini_batches_of_another_number_of_series_are_refused():
    model, x, y = make_linear(1, B, num_data=B + 1)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)})
    with pytest.raises(ValueError, match=f"expected num_data={B}, the number of series to take mini-batches of, got {B + 1}"):
        fit(model, guide, x, y, num_steps=1, batch_size=1, progress=False)
