"""Weights of annealed chains, against quadrature and closed forms."""

import math
from functools import partial
from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_lvgp.diagnostics import log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS, State, Transition
from pyro_lvgp.infer import ImportanceWeightedELBO
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM
from tests.guides.annealed.guide._models import LOSSES, assert_paths_agree, gplvm, hierarchy, standard_error

pytestmark = pytest.mark.usefixtures("float64")


def evidence_by_quadrature(model, u, Y):
    """Log p(y_n | u) on a grid of latents, from the formulas of the model."""
    axis = torch.linspace(-6.0, 6.0, 201)
    X = torch.cartesian_prod(*[axis] * model.latent_dim).reshape(-1, model.latent_dim)
    with torch.no_grad():
        Z, noise = model.inducing_points, model.likelihood.variance
        Kuu, Kuf = model.kernel(Z), model.kernel(Z, X)
        A = torch.linalg.solve(torch.linalg.cholesky(Kuu + 1e-8 * Kuu.diagonal().mean() * torch.eye(len(Z))), Kuf)
        residual = Y[:, None] - A.mT @ u.mT
        entries = -0.5 * (residual.square() + (model.kernel.diagonal(X) - A.square().sum(0))[:, None]) / noise
        entries = torch.where(torch.isnan(Y)[:, None], 0.0, entries - 0.5 * (2.0 * math.pi * noise).log()).sum(-1)
        log_prior = dist.Normal(0.0, 1.0).log_prob(X).sum(-1)
        return (entries + log_prior).logsumexp(-1) + model.latent_dim * (axis[1] - axis[0]).log()


def given(model, guide, u):
    """Model and guide at one u, which is in neither any more."""
    return poutine.condition(model, {"u": u}), poutine.block(poutine.condition(guide, {"u": u}), hide=["u"])


def weights_given(model, guide, u, Y, num_samples):
    return log_weights(*given(model, guide, u), Y, num_samples=num_samples, local_plate="data")


# Every pair of two of the three.
@pytest.mark.parametrize(
    ("latent_dim", "num_steps", "dynamics"),
    [(1 + (i + j) % 2, num_steps, name) for i, num_steps in enumerate([1, 4, 16]) for j, name in enumerate(TRANSITIONS)],
)
def test_weights_of_a_gplvm_are_unbiased(latent_dim, num_steps, dynamics):
    model, u, Y = gplvm(latent_dim)
    guide = AutoAnnealedLangevin(
        model, num_steps=num_steps, dynamics=dynamics, base_guide=MeanFieldGuide(model, init_scale=1.0), step_size=0.05
    )
    log_w = weights_given(model, guide, u, Y, 20_000)
    w = (log_w - evidence_by_quadrature(model, u, Y)).exp()
    assert (standard_error(w) < 0.05).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_bound_of_a_gplvm_rises_with_the_number_of_steps(dynamics):
    model, u, Y = gplvm(2)
    evidence, bounds = evidence_by_quadrature(model, u, Y).sum(), []
    for num_steps in (1, 4, 16, 64):
        pyro.clear_param_store()
        base = MeanFieldGuide(model, init_scale=1.0)
        guide = AutoAnnealedLangevin(model, num_steps=num_steps, dynamics=dynamics, base_guide=base, step_size=0.1)
        log_w = weights_given(model, guide, u, Y, 4000).sum(-1)
        assert log_w.mean() < evidence + 3.0 * standard_error(log_w)
        bounds.append(log_w.mean() - 3.0 * standard_error(log_w))
    assert all(longer > shorter for shorter, longer in pairwise(bounds))


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
@pytest.mark.parametrize("num_steps", [1, 4, 16])
def test_weights_with_a_linear_kernel_are_unbiased_for_factor_analysis(num_steps, dynamics):
    """With M ≥ Q nothing is lost to inducing points: y_n | u ~ N(0, W Wᵀ + σ² I)."""
    model, u, Y = gplvm(2, kernel=Linear(2))
    Y = torch.nan_to_num(Y)
    with torch.no_grad():
        Z = model.inducing_points
        L = torch.linalg.cholesky(Z @ Z.mT + 1e-8 * (Z @ Z.mT).diagonal().mean() * torch.eye(4))
        W = u @ torch.linalg.solve(L, Z)
        evidence = dist.MultivariateNormal(torch.zeros(3), W @ W.mT + model.likelihood.variance * torch.eye(3)).log_prob(Y)
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, num_steps=num_steps, dynamics=dynamics, base_guide=base, step_size=0.05)
    w = (weights_given(model, guide, u, Y, 20_000) - evidence).exp()
    assert (standard_error(w) < 0.05).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


def beta_bernoulli(y):
    """Joint and constrained: log p(y) = log B(2 + Σy, 3 + Σ(1 − y)) − log B(2, 3)."""
    p = pyro.sample("p", dist.Beta(2.0, 3.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


def gamma_poisson(y):
    """A rate for each datum: y_n is negative binomial."""
    with pyro.plate("data", len(y)):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(rate), obs=y)


def dirichlet_categorical(y):
    """A simplex, whose unconstrained space has one dimension less."""
    p = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(p), obs=y)


def _log_beta(a):
    return a.lgamma().sum() - a.sum().lgamma()


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
@pytest.mark.parametrize(
    ("model", "y", "plate", "evidence"),
    [
        (
            beta_bernoulli,
            torch.tensor([1.0, 1.0, 0.0, 1.0]),
            None,
            _log_beta(torch.tensor([5.0, 4.0])) - _log_beta(torch.tensor([2.0, 3.0])),
        ),
        (
            gamma_poisson,
            torch.tensor([0.0, 2.0, 5.0]),
            "data",
            dist.NegativeBinomial(2.0, torch.tensor(0.5)).log_prob(torch.tensor([0.0, 2.0, 5.0])),
        ),
        (
            dirichlet_categorical,
            torch.tensor([0.0, 2.0, 2.0]),
            None,
            _log_beta(torch.tensor([2.0, 2.0, 5.0])) - _log_beta(torch.tensor([1.0, 2.0, 3.0])),
        ),
    ],
    ids=["beta", "gamma", "dirichlet"],
)
def test_constrained_sites_have_the_right_jacobian(model, y, plate, evidence, dynamics):
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, local_plate=plate, num_steps=4, dynamics=dynamics, base_guide=base, step_size=0.1)
    w = (log_weights(model, guide, y, num_samples=10_000) - evidence).exp()
    assert (standard_error(w) < 0.05).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


def test_importance_weighting_tightens_the_annealed_bound():
    model, u, Y = gplvm(1)
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, num_steps=3, dynamics="overdamped", base_guide=base, step_size=0.1)
    bounds = []
    for num_samples in (1, 4, 16):
        bound = ImportanceWeightedELBO(num_samples=num_samples, marginalize=False, max_plate_nesting=1)
        draws = -torch.tensor([bound.loss(*given(model, guide, u), Y) for _ in range(100)])
        bounds.append((draws.mean(), standard_error(draws)))
    (one, e1), (four, e4), (many, e16) = bounds
    assert one + 3.0 * (e1 + e4) < four
    assert four + 3.0 * (e4 + e16) < many
    log_p_u = dist.Normal(0.0, 1.0).log_prob(u).sum()
    assert many < evidence_by_quadrature(model, u, Y).sum() + log_p_u + 3.0 * e16


def test_other_likelihoods_and_kernels_are_annealed_too():
    model = BayesianGPLVM(8, 3, 2, Linear(2) + 0.1 * Linear(2), num_inducing=4, likelihood=Poisson())
    Y = torch.randint(0, 5, (8, 3)).double()
    assert_paths_agree(partial(AutoAnnealedLangevin, num_steps=2), model, Y, LOSSES["drawn"](), Y)


def test_the_gaussian_term_sampled_is_annealed_as_its_expectation():
    model = BayesianGPLVM(8, 3, 2, num_inducing=4, likelihood=Gaussian(), likelihood_term="sampled")
    Y = torch.randn(8, 3)
    assert torch.isfinite(torch.tensor(Trace_ELBO().loss(model, AutoAnnealedLangevin(model, num_steps=2), Y)))


def test_weights_are_those_of_all_sites_before_the_first_call_too():
    y, guide = torch.randn(5), AutoAnnealedLangevin(hierarchy, num_steps=2)
    assert [log_weights(hierarchy, guide, y, num_samples=4).shape for _ in range(2)] == [(4,), (4,)]


class RandomWalk(Transition):
    """Forward and reverse densities are equal, and the score is not used."""

    def __call__(self, score, state, noise, beta, step_size, momentum_persistence):
        z = tuple(z + (2.0 * eta).sqrt() * e for z, eta, e in zip(state.z, step_size, noise, strict=True))
        return State(z, score(z), (), state.log_ratio)


@pytest.mark.parametrize("compile", [False, True])
def test_weights_under_a_transition_of_the_user_are_unbiased(compile):
    model, u, Y = gplvm(1)
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, num_steps=3, dynamics=RandomWalk(), base_guide=base, step_size=0.02, compile=compile)
    w = (weights_given(model, guide, u, Y, 20_000) - evidence_by_quadrature(model, u, Y)).exp()
    assert (standard_error(w) < 0.1).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


def test_a_transition_without_a_call_is_refused():
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (Transition,), {})()
