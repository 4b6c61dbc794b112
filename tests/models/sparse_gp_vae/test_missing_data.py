"""Missing rows, repeated inputs and small variances."""

import pytest
import torch

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from tests.helpers.sparse_processes import B, D, M, N, Q, assert_close, data, encoded, function, kernel, make, told_to_points
from tests.models.sparse_gp_vae._forms import every_form

pytestmark = pytest.mark.usefixtures("float64")


@encoded
def test_rows_of_nan_say_nothing(form):
    model, guide = make(form)
    x, y = data()
    kept = [n for n in range(N) if n != 1]
    before = function(guide, x, y)
    after = function(guide, x[kept], y[kept])
    assert_close([part[kept] for part in before], after)
    mean, scale = function(guide, x, torch.full_like(y, torch.nan))
    assert_close((mean, scale.square()), (torch.zeros(N, Q), model.kernel.diagonal(x).mT))


@encoded
def test_series_padded_with_nan_are_ragged(form):
    _, guide = make(form)
    x, y = data(B)
    y[0, 5:] = torch.nan
    mean, scale = function(guide, x, y)
    assert_close((mean[0, :5], scale[0, :5]), function(guide, x[0, :5], y[0, :5]))


@every_form
def test_one_point(form):
    model, guide = make(form)
    x, y = torch.rand(1, 1), torch.randn(1, D)
    loss = MeanFieldELBO("points").differentiable_loss(model, guide, x, y)
    loss.backward()
    for p in [*model.parameters(), *guide.parameters()]:
        assert p.grad is None or torch.isfinite(p.grad).all()


@encoded
def test_repeated_inputs_say_it_twice(form):
    _, guide = make(form)
    x, y = data()
    twice = function(guide, x[[0, 0, 3]], y[[0, 0, 3]])
    assert_close([part[0] for part in twice], [part[1] for part in twice])
    once = function(guide, x[[0, 3]], y[[0, 3]])
    assert (twice[1][0] < once[1][0]).all()


@encoded
def test_tiny_site_and_likelihood_variances_train(form):
    """Against collapse of the posterior: 1e-4 each."""
    net = told_to_points(form, IndexNet(D, Q, init_scale=0.01), Q)
    model = SparseGPVAE(kernel(), MLP(Q, D, (5,)), torch.rand(M, 1), Gaussian(1e-4))
    guide = SparseStructuredGPGuide(model, encoders={"u": net})
    history = fit(model, guide, *data(num_data=40), loss=MeanFieldELBO("points"), num_steps=50, progress=False)
    assert history.losses[-1] < 0.7 * history.losses[0]
