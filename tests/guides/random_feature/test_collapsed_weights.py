"""Collapsed weights: exact at every draw, below the evidence under logistic likelihoods."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch.distributions import MultivariateNormal

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer import BlockCoordinateVI, fit
from pyro_lvgp.infer.elbo.handlers import EvaluateBound
from pyro_lvgp.likelihoods import Bernoulli, Binomial, Gaussian, Logistic, NegativeBinomial
from pyro_lvgp.likelihoods import polya_gamma as polyagamma
from tests.guides.random_feature._models import settle, traces_of
from tests.helpers.random_features import D, N, features_of, make_pair, pin, with_holes

pytestmark = pytest.mark.usefixtures("float64")
LIKELIHOODS = {
    "bernoulli": Bernoulli,
    "binomial": lambda: Binomial(5),
    "negative-binomial": lambda: NegativeBinomial(torch.tensor([3.0, 6.0, 9.0]), data_dim=D),
}
FORMS = {
    "bernoulli": lambda y: polyagamma.binomial(y, torch.ones(())),
    "binomial": lambda y: polyagamma.binomial(y, torch.tensor(5.0)),
    "negative-binomial": lambda y: polyagamma.negative_binomial(y, torch.tensor([3.0, 6.0, 9.0])),
}


@pytest.mark.parametrize("in_bound", [nullcontext, EvaluateBound])
@pytest.mark.parametrize("data_dim", [D, None])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_weights_are_collapsed_exactly_at_every_draw_and_at_their_mean(Y, holes, frequencies, data_dim, in_bound):
    """log p(y | a) + log p(a) − log q(a) is the dense evidence of the draws of X and ω; so are its gradients."""
    Y = with_holes(Y) if holes else Y
    model, guide = make_pair(Y, Gaussian(0.3, data_dim=data_dim), frequencies=frequencies)
    with in_bound():
        q, p = traces_of(model, guide, Y)
    assert torch.equal(q["a"]["value"], q["a"]["fn"].mean) == (in_bound is EvaluateBound)
    ours = p["y"]["log_prob"].sum() + p["a"]["log_prob"].sum() - q["a"]["log_prob"].sum()
    features, noise = model.features(q["X"]["value"], q["omega"]["value"]), model.likelihood.variance.expand(D)
    dense = 0.0
    for d in range(D):
        seen = ~torch.isnan(Y[:, d])
        K = features[seen] @ features[seen].mT + noise[d] * torch.eye(int(seen.sum()))
        dense = dense + MultivariateNormal(torch.zeros(len(K)), K).log_prob(Y[seen, d] - model.mean[d])
    torch.testing.assert_close(ours, dense)
    parameters = [*model.likelihood.parameters(), *guide.X.parameters(), *guide.omega.parameters()]
    slopes = (torch.autograd.grad(value, parameters, retain_graph=True) for value in (ours, dense))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


class _Geometric(Logistic):
    """Failures before the first success, as a user would write it."""

    def distribution(self, f, params):
        return dist.Geometric(logits=-f)

    def inverse_link(self, y):
        return (y + 0.5).log()

    def exponents(self, y, params):
        return y, y + 1.0


def test_weights_of_another_logistic_likelihood_are_collapsed_too():
    """A geometric one is negative binomial with r = 1."""
    Y = with_holes(NegativeBinomial(1.0)(torch.randn(N, D)).sample().detach())
    known = NegativeBinomial(1.0).requires_grad_(False)
    bounds = []
    for likelihood in (_Geometric(), known):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = make_pair(Y, likelihood, frequencies="gaussian")
        assert guide.weights == "collapsed"
        losses = fit(model, guide, Y, optim=guide.blocks(), num_steps=5, progress=False).losses
        bounds.append(losses)
        y, f = torch.tensor([0.0, 3.0]), torch.tensor([-1.0, 2.0], requires_grad=True)
        (slope,) = torch.autograd.grad(likelihood(f).log_prob(y).sum(), f)
        torch.testing.assert_close(likelihood.log_prob_derivatives(y, f.detach(), likelihood.params())[0], slope)
    torch.testing.assert_close(*map(torch.as_tensor, bounds))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_logistic_bound_lies_between_polya_gamma_and_the_evidence(name):
    """The likelihood itself under the Gaussian weights of the Pólya-gamma bound is tighter than that bound."""
    pyro.set_rng_seed(3)
    likelihood = LIKELIHOODS[name]()
    Y = likelihood(torch.randn(N, D)).sample().detach()
    # The likelihood is known: initialize leaves it as it is.
    model, guide = make_pair(with_holes(Y), LIKELIHOODS[name]().requires_grad_(False), frequencies="gaussian")
    Y = guide.data
    model.mean = torch.zeros(D)
    settle(guide, Y)

    def log_weights(number):
        with pyro.plate("draws", number, dim=-2), torch.no_grad():
            q, p = traces_of(model, guide, Y)
        return (p["y"]["log_prob"].sum(-1) + p["a"]["log_prob"].sum(-1) - q["a"]["log_prob"].sum(-1)).squeeze()

    draws, others = log_weights(400), log_weights(4000)
    form = FORMS[name](torch.nan_to_num(Y)).where(~torch.isnan(Y))
    lower = polyagamma.collapsed_log_bound(features_of(model, guide), form, guide.a.c).sum().detach()
    error = draws.std() / 20.0
    assert draws.mean() > lower - 3.0 * error
    # The evidence, which other draws estimate by importance weighting.
    evidence = others.logsumexp(0) - math.log(len(others))
    weights = (others - evidence).exp()
    assert draws.mean() - 3.0 * error < evidence + 3.0 * weights.std() / len(others) ** 0.5
    assert evidence - lower < 2.0


@pytest.mark.parametrize("bound", [Trace_ELBO(), TraceMeanField_ELBO()])
def test_bounds_of_blocks_take_the_weights_at_their_mean(Y, bound):
    """And have the same value there as at a draw, which is what all others get; so do bounds of some rows."""
    model, guide = make_pair(Y, frequencies="gaussian")
    pin(guide)
    vi, some = BlockCoordinateVI(model, guide, guide.blocks(), loss=bound), torch.tensor([0, 2])
    at_mean, at_draw = (seeded(0)(loss)(*args) for loss, args in ((vi.evaluate_loss, (Y,)), (bound.loss, (model, guide, Y))))
    assert at_mean == pytest.approx(at_draw, rel=1e-9)
    spread = {}
    for handler in (EvaluateBound, nullcontext):
        for args in ((Y,), (Y[some], some)):
            with handler(), torch.no_grad():
                spread[handler, len(args)] = float((guide(*args)["a"] - guide(*args)["a"]).abs().max())
    assert spread.pop((EvaluateBound, 1)) < 1e-6
    assert min(spread.values()) > 1e-2


def test_mini_batches_of_collapsed_weights_are_unbiased(Y):
    model, guide = make_pair(Y, frequencies="gaussian")
    elbo = TraceMeanField_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1)
    with torch.no_grad():
        whole = torch.tensor([elbo.loss(model, guide, Y) for _ in range(20)])
        parts = torch.tensor([elbo.loss(model, guide, Y[i], i) for _ in range(20) for i in torch.randperm(N).split(4)])
    parts = parts.unflatten(0, (20, 3)).mean(1)
    assert abs(whole.mean() - parts.mean()) < 4.0 * ((whole.var() + parts.var()) / 20).sqrt()
