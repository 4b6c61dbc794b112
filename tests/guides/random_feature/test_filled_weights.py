"""Weights of data whose gaps are filled."""

from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.conjugate.feature_regression import gaussian_log_density, weight_posterior
from pyro_lvgp.infer import BlockCoordinateVI
from pyro_lvgp.likelihoods import Gaussian
from tests.guides.random_feature._models import traces_of
from tests.helpers.random_features import D, F, N, features_of, make_pair, pin, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def _filled(Y):
    """A pinned pair with filled weights, and the exact posterior of the weights."""
    model, guide = make_pair(Y, Gaussian(0.3), weights="filled", frequencies="gaussian")
    pin(guide)
    zero = torch.zeros_like(Y)
    return model, guide, weight_posterior(features_of(model, guide), *model.weight_sites(Y, zero, zero))


def test_filled_weights_are_collapsed_ones_where_nothing_is_missing(Y):
    model, guide, exact = _filled(Y)
    assert exact.precision_tril.shape == (1, 2 * F, 2 * F)
    q, _ = traces_of(model, guide, Y)
    torch.testing.assert_close(q["a"]["fn"].mean, exact.mean)
    torch.testing.assert_close(q["a"]["fn"].precision_tril, exact.precision_tril)


def test_filled_weights_may_be_collapsed_after_the_fit():
    Y = with_holes(torch.randn(N, D))
    model, guide, exact = _filled(Y)
    guide(Y)
    guide.weights = "collapsed"
    q, _ = traces_of(model, guide, Y)
    torch.testing.assert_close(q["a"]["fn"].mean, exact.mean)
    torch.testing.assert_close(q["a"]["fn"].precision_tril, exact.precision_tril)


def test_gaps_rest_while_weights_are_collapsed():
    Y = with_holes(torch.randn(N, D))
    model, guide = make_pair(Y, weights="filled")
    BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    gaps = guide.a.gaps.detach().clone()
    guide.weights = "collapsed"
    BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    assert torch.equal(guide.a.gaps, gaps)
    guide.weights = "filled"
    BlockCoordinateVI(model, guide, guide.blocks()).step(Y)
    assert not torch.equal(guide.a.gaps, gaps)


@pytest.mark.parametrize(
    ("weights", "others"),
    [("filled", ["explicit", "shared"]), ("collapsed", ["filled", "explicit"]), ("explicit", ["collapsed", "shared"])],
)
def test_weights_stay_what_they_ran_with(Y, weights, others):
    _, guide = make_pair(Y, weights=weights, frequencies="gaussian")
    guide.weights = weights
    for other in others:
        with pytest.raises(ValueError, match=f"weights=\"{weights}\" of a guide that has run with them, got '{other}'"):
            guide.weights = other
    assert guide.weights == weights


def test_filling_gaps_raises_the_bound_to_that_of_the_exact_means():
    Y = with_holes(torch.randn(N, D))
    model, guide, exact = _filled(Y)
    features, observed = features_of(model, guide), ~torch.isnan(Y)

    def bound():
        """Of the data, in closed form: E log p(y | a) − KL(q(a) ‖ p(a))."""
        weights = guide.a.posterior(model, guide.data, features)
        precision = weights.precision_tril @ weights.precision_tril.mT
        posterior = MultivariateNormal(weights.mean, precision_matrix=precision.expand(D, -1, -1))
        f = model.mean + features @ weights.mean.mT
        spread = (features @ precision.inverse().squeeze(0) * features).sum(-1, keepdim=True)
        density = dist.Normal(f, model.likelihood.variance.sqrt()).log_prob(torch.nan_to_num(Y))
        expected = torch.where(observed, density - 0.5 * spread / model.likelihood.variance, 0.0).sum()
        prior = MultivariateNormal(torch.zeros(2 * F), torch.eye(2 * F))
        return (expected - kl_divergence(posterior, prior).sum()).item()

    guide(Y)
    bounds = [bound()]
    for _ in range(400):
        guide.a.gaps = guide._update_weights(Y)["guide.a.gaps"]
        bounds.append(bound())
    assert min(b - a for a, b in pairwise(bounds)) > -1e-8
    assert bounds[-1] > bounds[0] + 0.1
    torch.testing.assert_close(guide.a.posterior(model, guide.data, features).mean, exact.mean, rtol=0.0, atol=1e-5)
    centred = torch.nan_to_num(Y - model.mean)
    assert bounds[-1] < gaussian_log_density(features, centred, observed, model.likelihood.variance[None]).sum()
    # What guide and model say of one draw of the weights is this bound on average.
    with pyro.plate("draws", 4000, dim=-2), torch.no_grad():
        q, p = traces_of(model, guide, Y)
    terms = p["y"]["log_prob"].sum(-1) + p["a"]["log_prob"].sum(-1) - q["a"]["log_prob"].sum(-1)
    assert abs(terms.mean().item() - bounds[-1]) < 4.0 * terms.std().item() / len(terms) ** 0.5


@pytest.mark.parametrize("weights", ["collapsed", "filled"])
def test_gaps_filled_by_others_after_the_fit_do_not_reach_the_weights(Y, weights):
    Y = with_holes(Y)
    model, guide = make_pair(Y, weights=weights)
    X, before = guide.X.loc.detach(), guide.data.clone()
    Y.nan_to_num_(50.0)
    model.predict(guide, X, num_samples=2)
    torch.testing.assert_close(guide.data, before, equal_nan=True)
