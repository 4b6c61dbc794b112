"""Predictions and the learned kernel."""

import math

import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import RandomFeatureLVM
from tests.helpers.random_features import D, N, Q, features_of, make_pair, pin

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("weights", ["collapsed", "explicit", "shared"])
def test_predict_equals_exact_regression(Y, weights):
    """With latents and frequencies pinned: Gaussian-process regression with the kernel of the features."""
    model, guide = make_pair(Y, Gaussian(0.2), frequencies="gaussian", weights=weights)
    pin(guide)
    if weights != "collapsed":
        values = guide._update_weights(Y)
        guide.a.linear, guide.a.precision = (values[f"guide.a.{name}"].detach() for name in ("linear", "precision"))
    X_new = torch.randn(5, Q)
    old, new = features_of(model, guide), model.features(X_new, guide.omega.loc).detach()
    gain = new @ old.mT @ torch.linalg.inv(old @ old.mT + 0.2 * torch.eye(N))
    prediction = model.predict(guide, X_new, num_samples=300)
    mean = model.mean + gain @ (Y - model.mean)
    variance = (new @ new.mT - gain @ old @ new.mT).diagonal()[:, None].expand(5, D) + 0.2
    assert ((prediction.mean - mean).abs() < 4.5 * (variance / 300).sqrt()).all()
    torch.testing.assert_close(prediction.variance, variance, rtol=0.2, atol=0.0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # scikit-learn's, of a variance of one row
def test_one_row_of_one_column():
    y = torch.ones(1, 1)
    model = RandomFeatureLVM(1, 1, 1, num_frequencies=4).initialize(y)
    guide = RandomFeatureGuide(model)
    assert all(math.isfinite(loss) for loss in fit(model, guide, y, optim=guide.blocks(), num_steps=3, progress=False).losses)


@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_learned_kernel_is_the_mean_of_its_draws(Y, frequencies):
    model, guide = make_pair(Y, frequencies=frequencies)
    X, X2 = torch.randn(4, Q), torch.randn(3, Q)
    if frequencies == "gaussian":
        mean_field = MeanFieldGuide(model)
        mean_field(Y)
        mean_field.locs.omega, mean_field.scales.omega = guide.omega.loc.detach(), guide.omega.scale.detach()
        torch.testing.assert_close(model.kernel(mean_field, X, X2), model.kernel(guide, X, X2))
    q, both = guide.omega.posterior(model), torch.cat([X, X2])
    draws = torch.stack([model.features(both, q.sample()).detach() for _ in range(500)])
    products = draws[:, :4] @ draws[:, 4:].mT
    error = products.std(0) / 500**0.5
    assert ((products.mean(0) - model.kernel(guide, X, X2)).abs() < 4.0 * error).all()
    torch.testing.assert_close(model.kernel(guide, X).diagonal(), model.kernel_variance.detach().expand(4))
    grid = torch.linspace(-2.0, 2.0, 101)
    density = model.spectral_density(guide, torch.cartesian_prod(grid, grid))
    assert density.sum() * 0.04**2 == pytest.approx(1.0, abs=1e-3)
