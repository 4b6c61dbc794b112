"""Bounds and importance weights of every guide."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Importance, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.importance import psis_diagnostic, vectorized_importance_weights

from pyro_lvgp.diagnostics import to_arviz
from tests.guides.conformance._guides import (
    GUIDES,
    Problem,
    agree,
    draw,
    estimate,
    every_pair,
    latent_sites,
    loss_at,
    start,
    vectorised,
)


def estimates(problem, guide, make, num):
    """Pyro's two bounds at the same draws, by traces of the one that checks more."""
    checking, other = make(TraceMeanField_ELBO), make(Trace_ELBO)
    traces = [list(checking._get_traces(problem.model, guide, problem.args, {})) for _ in range(num)]
    for bound in (checking, other):
        draws = iter(traces)
        bound._get_traces = lambda *_, draws=draws: next(draws)
        yield estimate(lambda bound=bound: bound.loss(problem.model, guide, *problem.args), num)


@every_pair
def test_all_bounds_estimate_one_number(guide_id, model_id):
    """Vectorised or not, with an analytic KL or without; but where the analytic KL bounds that of mixtures, a higher loss."""
    problem, guide = start(guide_id, model_id)
    for loss, _ in estimates(problem, guide, partial(vectorised, problem, num_particles=3), 2):
        assert math.isfinite(loss)
    by_kl, by_draws = estimates(problem, guide, partial(vectorised, problem, num_particles=100), 12)
    by_kl_one_by_one, by_draws_one_by_one = estimates(problem, guide, lambda bound: bound(), 30)
    assert agree(by_kl, by_kl_one_by_one), (by_kl, by_kl_one_by_one)
    assert agree(by_draws, by_draws_one_by_one), (by_draws, by_draws_one_by_one)
    if model_id == "rflvm":
        assert by_kl[0] > by_draws[0] - 4.0 * math.sqrt(by_kl[1] + by_draws[1]), (by_kl, by_draws)
    else:
        assert agree(by_kl, by_draws), (by_kl, by_draws)


def tilted(y, observed, level):
    """A factor, a mask and a scale in the plate; and priors as narrow as guides start, so that weights are tame."""
    pyro.sample("shift", dist.LogNormal(1.0, 0.1))
    with pyro.plate("data", 3, dim=-1):
        x = pyro.sample("x", dist.LogNormal(torch.ones(2), 0.1).to_event(1))
        pyro.factor("tilt", level - 10.0 * (x.log() - 1.0).square().sum(-1))
        with poutine.mask(mask=observed), poutine.scale(scale=2.0):
            pyro.sample("y", dist.Normal(x.log() - 1.0, 0.2).to_event(1), obs=y)


def tilted_by_hand(y, observed, level):
    """The same, in unconstrained coordinates and without handlers."""
    pyro.sample("shift", dist.Normal(1.0, 0.1))
    with pyro.plate("data", 3, dim=-1):
        h = pyro.sample("x", dist.Normal(torch.ones(2), 0.1).to_event(1)) - 1.0
        log_likelihood = dist.Normal(h, 0.2).log_prob(y).sum(-1)
        pyro.factor("all", level - 10.0 * h.square().sum(-1) + 2.0 * torch.where(observed, log_likelihood, 0.0))


def log_evidence(y, observed, level):
    """Log of ∫ N(h; 0, 0.1²) exp(−10 h²) N(y; h, 0.2²)^2o dh, entry by entry."""
    o = observed[:, None].double()
    precision = 100.0 + 20.0 + 50.0 * o
    likelihood = -math.log(2.0 * math.pi * 0.04) - 25.0 * y.square() + (50.0 * y).square() / (2.0 * precision)
    return 3.0 * level + (0.5 * (100.0 / precision).log() + o * likelihood).sum()


@pytest.mark.parametrize(
    "guide_id", [guide for guide, entry in GUIDES.items() if {"global", "local"} & {*entry.models.split()}]
)
def test_factor_mask_and_scale(guide_id):
    args = (0.1 * torch.randn(3, 2), torch.tensor([True, False, True]), torch.tensor(1.0))
    problems = [Problem(model, args, "x", 1, ("x",), local={"local_plate": "data"}) for model in (tilted, tilted_by_hand)]
    with pyro.settings.context(module_local_params=True):
        guide, by_hand = (GUIDES[guide_id].make(problem) for problem in problems)
        for g in (guide, by_hand):
            g(*args)
        by_hand.load_state_dict(guide.state_dict())
        for name, value in draw(guide, args).items():
            torch.testing.assert_close(value.log(), draw(by_hand, args)[name])
        loss = loss_at(problems[0], guide)
        torch.testing.assert_close(loss, loss_at(problems[1], by_hand))
        higher = problems[0]._replace(args=(*args[:2], args[2] + 1.0))
        torch.testing.assert_close(loss_at(higher, guide), loss - 3.0)
        with poutine.scale(scale=0.5):
            torch.testing.assert_close(loss_at(problems[0], guide), 0.5 * loss)
        with torch.no_grad():
            log_w = vectorized_importance_weights(tilted, guide, *args, num_samples=4000, max_plate_nesting=1)[0].double()
        weights = (log_w - log_evidence(*args)).exp()
        assert weights.std() < 2.0
        assert weights.mean() == pytest.approx(1.0, abs=4.0 * weights.std().item() / 4000**0.5)


@every_pair
def test_importance_weights(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    posterior = Importance(problem.model, guide, num_samples=5).run(*problem.args)
    assert 0.999 < posterior.get_ESS() < 5.001
    if model_id == "global":
        assert math.isfinite(psis_diagnostic(problem.model, guide, *problem.args, num_particles=200))


@every_pair
def test_arviz(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    tree = to_arviz(problem.model, guide, *problem.args, num_samples=4, seed=0)
    assert set(tree.posterior.data_vars) == set(latent_sites(problem))
    for name, value in tree.posterior.data_vars.items():
        assert value.sizes["draw"] == 4
        assert value.notnull().all(), name
    assert abs(tree.sample_stats["log_weight"]).max() < math.inf
