"""Gradients and mini-batches of annealed bounds."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO
from tests.guides.annealed.guide._models import LOSSES, Traced, at_its_start, gplvm, standard_error, value_and_gradients
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "traced"])
@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_gradients_are_those_of_finite_differences(dynamics, pure):
    model, Y = small()
    target = model if pure else Traced(model)
    guide = AutoAnnealedLangevin(target, num_steps=3, dynamics=dynamics, base_weight=0.0)
    guide(Y)
    loss = LOSSES["drawn"]()
    parameters = [*model.parameters(), *guide.parameters()]
    _, gradients = value_and_gradients(target, guide, loss, Y)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction, epsilon = torch.randn_like(parameter), 1e-5
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter += sign * epsilon * direction
                torch.manual_seed(5)
                values.append(loss.differentiable_loss(target, guide, Y))
                parameter -= sign * epsilon * direction
        numerical = (values[0] - values[1]) / (2.0 * epsilon)
        assert torch.allclose((gradient * direction).sum(), numerical, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("pure", [True, False], ids=["pure", "traced"])
def test_base_weight_adds_the_gradient_of_the_bound_of_the_base(pure, covariance):
    model, Y = small()
    target = model if pure else Traced(model)

    def gradients_of(base_weight, sample=lambda guide: guide):
        pyro.clear_param_store()
        torch.manual_seed(1)
        base = MeanFieldGuide(target, covariance={"X": covariance}, init_scale=0.5)
        guide = AutoAnnealedLangevin(target, num_steps=2, step_size=0.2, base_guide=base, base_weight=base_weight)
        guide(Y)
        parameters = [guide.base_guide.locs.X_unconstrained, guide.base_guide.scales.X_unconstrained]
        torch.manual_seed(5)
        value = LOSSES["drawn"]().differentiable_loss(target, sample(guide), Y)
        return value, torch.autograd.grad(value, parameters)

    value, alone = gradients_of(0.0)
    same_value, both = gradients_of(2.0)
    _, of_base = gradients_of(0.0, lambda guide: guide.without_transitions)
    assert torch.equal(value, same_value)
    for annealed, total, base in zip(alone, both, of_base, strict=True):
        assert torch.allclose(total, annealed + 2.0 * base, rtol=1e-8, atol=1e-8)


def test_detached_scores_leave_the_value_and_change_the_gradient():
    model, Y = small()
    (through, gradients), (detached, others) = (
        at_its_start(partial(AutoAnnealedLangevin, num_steps=3, differentiate_score=whether), model, Y, LOSSES["drawn"](), Y)
        for whether in (True, False)
    )
    assert torch.allclose(through, detached, rtol=1e-12)
    assert not all(torch.allclose(a, b) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        partial(Trace_ELBO, num_particles=8, vectorize_particles=True),
        partial(MeanFieldELBO, num_samples=8),
        partial(ImportanceWeightedELBO, num_samples=3, num_particles=4),
    ],
    ids=["drawn", "integrated", "weighted"],
)
def test_mini_batches_are_unbiased_for_all_rows(make):
    """Over all pairs of rows, with as many draws of each."""
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=2)
    guide(Y)
    bound = make(max_plate_nesting=1)
    full = torch.tensor([bound.loss(model, guide, Y) for _ in range(13)])
    pairs = torch.combinations(torch.arange(8))
    halves = torch.tensor([[bound.loss(model, guide, Y[idx], idx) for _ in range(2)] for idx in pairs])
    error = (halves.diff(dim=1).square() / 4.0).sum().sqrt() / len(pairs)
    assert abs(full.mean() - halves.mean()) < 3.0 * torch.hypot(standard_error(full), error)


def test_integrating_bounds_anneal_towards_the_expectation_over_u():
    """At Q = 1, IW with many draws finds Σ_n log ∫ exp(E_q(u) log p(y_n | x, u)) N(x; 0, 1) dx."""
    model, _, Y = gplvm(1)
    base = MeanFieldGuide(model, init_scale=0.7)
    guide = AutoAnnealedLangevin(model, num_steps=4, base_guide=base, step_size=0.1)
    guide(Y)
    mean, L = base.locs.u.detach(), base.scales.u.detach()
    X = torch.linspace(-7.0, 7.0, 1001)[:, None]
    with torch.no_grad():
        Z, noise = model.inducing_points, model.likelihood.variance
        Luu = torch.linalg.cholesky(model.kernel(Z) + 1e-8 * torch.eye(4))
        A = torch.linalg.solve(Luu, model.kernel(Z, X))
        spread = model.kernel.diagonal(X) - A.square().sum(0)
        variance = spread[:, None] + torch.einsum("mx,dmk,djk,jx->xd", A, L, L, A)
        entries = -0.5 * ((Y[:, None] - A.mT @ mean.mT).square() + variance) / noise - 0.5 * (2 * math.pi * noise).log()
        rows = torch.where(torch.isnan(Y)[:, None], 0.0, entries).sum(-1) + dist.Normal(0.0, 1.0).log_prob(X).sum(-1)
        want = (rows.logsumexp(-1) + (X[1] - X[0]).log()).sum()
    kl = TraceMeanField_ELBO(max_plate_nesting=1).loss(
        lambda: _u_site(dist.Normal(torch.zeros(4), 1.0).to_event(1)),
        lambda: _u_site(dist.MultivariateNormal(mean, scale_tril=L)),
    )
    loss = ImportanceWeightedELBO(num_samples=2000, max_plate_nesting=1)
    got = -torch.tensor([loss.loss(model, guide, Y) for _ in range(20)])
    assert standard_error(got) < 0.02
    assert abs(got.mean() + kl - want) < 0.03


def _u_site(fn):
    with pyro.plate("outputs", 3):
        pyro.sample("u", fn)
