"""The Pólya-gamma bound against quadrature over the weights."""

import pyro
import pytest
import torch

from pyro_lvgp.conjugate.feature_regression import function_moments, weight_posterior
from pyro_lvgp.kernels import random_features
from pyro_lvgp.likelihoods import Bernoulli, Binomial, NegativeBinomial
from pyro_lvgp.likelihoods import polya_gamma as polyagamma

N, D = 8, 2
LIKELIHOODS = {
    "bernoulli": (Bernoulli(), lambda y: polyagamma.binomial(y, torch.ones(()))),
    "binomial": (Binomial(5), lambda y: polyagamma.binomial(y, torch.tensor(5.0))),
    "negative-binomial": (
        NegativeBinomial(torch.tensor([3.0, 10.0]), data_dim=D),
        lambda y: polyagamma.negative_binomial(y, torch.tensor([3.0, 10.0])),
    ),
}
every_likelihood = pytest.mark.parametrize("name", LIKELIHOODS)


pytestmark = pytest.mark.usefixtures("float64")


def _problem(name):
    likelihood, form = LIKELIHOODS[name]
    features = random_features(torch.randn(N, 1), torch.ones(1, 1))
    y = likelihood.to(torch.float64)(features @ torch.randn(2, D)).sample()
    return features, y, form(y), likelihood


def _fixed_point(features, form):
    c = torch.ones(N, D)
    for _ in range(300):
        posterior = weight_posterior(features, form.kappa, polyagamma.precision(form.trials, c))
        c = polyagamma.variational_parameter(*function_moments(posterior, features))
    return c


def _log_evidence(features, y, likelihood):
    """Log ∫ N(a; 0, I) Π_n p(y_nd | φ_nᵀ a) da on a grid."""
    grid = torch.linspace(-9.0, 9.0, 451)
    a = torch.cartesian_prod(grid, grid)
    f = (a @ features.mT)[..., None].expand(-1, -1, D)
    prior = torch.distributions.Normal(0.0, 1.0).log_prob(a).sum(-1)
    log_joint = prior[:, None] + likelihood(f).log_prob(y).sum(-2)
    return (log_joint.logsumexp(0) + 2.0 * (grid[1] - grid[0]).log()).detach()


@every_likelihood
def test_exponents_are_those_of_the_likelihood(name):
    likelihood, form = LIKELIHOODS[name]
    y = likelihood.to(torch.float64)(torch.randn(N, D)).sample().detach()
    a, b = likelihood.exponents(y, likelihood.params())
    torch.testing.assert_close(a - 0.5 * b, form(y).kappa)
    torch.testing.assert_close(b.expand(y.shape), form(y).trials)


@every_likelihood
def test_form_is_the_likelihood(name):
    _, y, form, likelihood = _problem(name)
    psi = torch.randn(N, D)
    log_prob = form.log_constant + (form.kappa + 0.5 * form.trials) * psi - form.trials * torch.nn.functional.softplus(psi)
    torch.testing.assert_close(log_prob, likelihood(psi).log_prob(y).detach())


@every_likelihood
def test_entry_is_bounded_everywhere_and_touched_at_c(name):
    _, y, form, likelihood = _problem(name)
    c, psi = 3.0 * torch.rand(N, D), 4.0 * torch.randn(100, N, D)

    def bound(psi):
        curve = form.kappa * psi - 0.5 * polyagamma.precision(form.trials, c) * psi.square()
        return curve + polyagamma.log_offset(form, c)

    assert (bound(psi) <= likelihood(psi).log_prob(y) + 1e-10).all()
    for touching in (c, -c):
        torch.testing.assert_close(bound(touching), likelihood(touching).log_prob(y).detach())


@every_likelihood
def test_collapsed_bound_is_below_the_evidence_and_tight(name):
    features, y, form, likelihood = _problem(name)
    evidence = _log_evidence(features, y, likelihood)
    best = polyagamma.collapsed_log_bound(features, form, _fixed_point(features, form))
    for c in (torch.zeros(N, D), torch.ones(N, D), 4.0 * torch.rand(N, D)):
        assert (polyagamma.collapsed_log_bound(features, form, c) <= best).all()
    gap = evidence - best
    assert (gap > 0.0).all()
    assert (gap < 0.2).all()


@every_likelihood
def test_gradient_in_c_is_zero_at_the_fixed_point(name):
    features, _, form, _ = _problem(name)
    c = _fixed_point(features, form).requires_grad_()
    (slope,) = torch.autograd.grad(polyagamma.collapsed_log_bound(features, form, c).sum(), c)
    torch.testing.assert_close(slope, torch.zeros(N, D), rtol=0.0, atol=1e-10)
    elsewhere = (c.detach() + 0.5).requires_grad_()
    (slope,) = torch.autograd.grad(polyagamma.collapsed_log_bound(features, form, elsewhere).sum(), elsewhere)
    assert (slope < 0.0).all()


@every_likelihood
def test_every_step_of_the_fixed_point_climbs(name):
    features, _, form, _ = _problem(name)
    c, bounds = 3.0 * torch.rand(N, D), []
    for _ in range(10):
        bounds.append(polyagamma.collapsed_log_bound(features, form, c))
        posterior = weight_posterior(features, form.kappa, polyagamma.precision(form.trials, c))
        c = polyagamma.variational_parameter(*function_moments(posterior, features))
    assert (torch.stack(bounds).diff(dim=0) >= -1e-12).all()


def test_missing_entries_are_as_good_as_removed():
    features, _, form, _ = _problem("negative-binomial")
    observed = torch.rand(N, D) < 0.5
    observed[0] = True
    c = torch.rand(N, D)
    value = polyagamma.collapsed_log_bound(features, form.where(observed), c)
    for d in range(D):
        kept = polyagamma.LogisticForm(*(x[observed[:, d], d : d + 1] for x in form))
        one = polyagamma.collapsed_log_bound(features[observed[:, d]], kept, c[observed[:, d], d : d + 1])
        torch.testing.assert_close(value[d], one.squeeze())


def test_dispersion_has_the_gradient_of_the_bound():
    """By differences, log gamma terms and all; near the evidence's own."""
    features, y, _, _ = _problem("negative-binomial")
    r = torch.tensor([3.0, 10.0], requires_grad=True)
    c = _fixed_point(features, polyagamma.negative_binomial(y, r.detach()))

    def bound(r):
        return polyagamma.collapsed_log_bound(features, polyagamma.negative_binomial(y, r), c)

    (slope,) = torch.autograd.grad(bound(r).sum(), r)
    step = 1e-5
    torch.testing.assert_close(slope, (bound(r + step) - bound(r - step)).detach() / (2.0 * step), rtol=1e-6, atol=1e-8)
    with pyro.settings.context(module_local_params=True):
        evidence = [_log_evidence(features, y, NegativeBinomial(r.detach() + s, data_dim=D)) for s in (-0.01, 0.01)]
    torch.testing.assert_close(slope, (evidence[1] - evidence[0]) / 0.02, rtol=0.2, atol=0.02)


def test_precision_is_smooth_at_zero():
    c = torch.tensor([0.0, 1e-9, 9.99e-4, 1.001e-3, 1.0], requires_grad=True)
    exact = torch.tanh(c.detach()[1:] / 2.0) / (2.0 * c.detach()[1:])
    value = polyagamma.precision(torch.ones(()), c)
    torch.testing.assert_close(value[1:], exact, rtol=1e-11, atol=0.0)
    assert value[0] == 0.25
    (slope,) = torch.autograd.grad(value.sum(), c)
    torch.testing.assert_close(slope[:4], -c[:4].detach() / 24.0, rtol=1e-5, atol=1e-9)
