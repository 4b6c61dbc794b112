"""Fits of guides with their defaults from one start, and their bounds and posteriors."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from benchmarks.core.isolated import default_dtype, isolated
from benchmarks.peers.numpyro_nuts import nuts
from benchmarks.tasks.any_model.posterior import Distance, Moments, unconstrained
from benchmarks.tasks.any_model.problem import Problem
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import fit
from pyro_lvgp.infer.sampling import sample_traces

_FIRST_EVALUATIONS = 20


@dataclass(frozen=True)
class Budget:
    """Sizes of fits, evaluations and references.

    :param num_steps: steps of a fit.
    :param num_evaluations: evaluations of the bound after the fit.
    :param num_draws: draws from a guide, for its moments.
    :param num_chains: chains of NUTS.
    :param num_transitions: transitions of a chain of NUTS for adaptation, and draws after these.
    """

    num_steps: int
    num_evaluations: int
    num_draws: int
    num_chains: int
    num_transitions: int


class Estimate(NamedTuple):
    """Mean of evaluations of a bound in nats, with its standard error."""

    mean: float
    error: float


@dataclass
class Outcome:
    """Results of a fit, as far as it got.

    :param first: bound before the first step.
    :param bound: bound after the last step.
    :param distance: distance of the posterior from the reference.
    :param seconds: wall seconds of the fit.
    :param failure: the error that ended the contest.
    """

    first: Estimate | None = None
    bound: Estimate | None = None
    distance: Distance | None = None
    seconds: float = 0.0
    failure: Exception | None = None


def contend(
    make_problem: Callable[[], Problem],
    make_guide: Callable[..., Any],
    budget: Budget,
    *,
    reference: Moments | None,
    seed: int,
) -> Outcome:
    """Fit a guide with the defaults of ``fit``, and measure it; an error ends the contest, and is a part of the outcome.

    :param make_problem: function that makes the model and its data.
    :param make_guide: class of the guide.
    :param budget: sizes.
    :param reference: posterior moments to compare with, if there are any.
    :param seed: seed of the start, the fit and the draws.
    """
    outcome = Outcome()
    with isolated(seed), default_dtype(torch.float64):
        try:
            _fit_and_measure(outcome, make_problem(), make_guide, budget, reference, seed)
        except Exception as error:  # whatever a guide raises is its result
            outcome.failure = error
    return outcome


def _fit_and_measure(
    outcome: Outcome,
    problem: Problem,
    make_guide: Callable[..., Any],
    budget: Budget,
    reference: Moments | None,
    seed: int,
) -> None:
    guide = make_guide(problem.model)
    outcome.first = evaluate_bound(problem, guide, _FIRST_EVALUATIONS)
    history = fit(problem.model, guide, *problem.tensors, num_steps=budget.num_steps, seed=seed, progress=False)
    outcome.seconds = history.seconds[-1]
    outcome.bound = evaluate_bound(problem, guide, budget.num_evaluations)
    if reference is not None:
        outcome.distance = Distance.between(guide_moments(problem, guide, budget.num_draws), reference)


@torch.no_grad()
def evaluate_bound(problem: Problem, guide: Callable[..., Any], num_evaluations: int) -> Estimate:
    """Average evaluations of ``Trace_ELBO``."""
    loss = Trace_ELBO()
    values = -np.array([loss.loss(problem.model, guide, *problem.tensors) for _ in range(num_evaluations)])
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(num_evaluations))


def guide_moments(problem: Problem, guide: Callable[..., Any], num_draws: int) -> Moments:
    """Estimate the moments of a guide from independent draws: those of its ``sample_posterior`` if it is annealed."""
    if isinstance(guide, AutoAnnealedLangevin):
        draws = guide.sample_posterior(num_draws, *problem.tensors)
    else:
        options: dict[str, Any] = {"predict": False, "log_likelihood": False, "vectorize": problem.vectorize}
        traces = sample_traces(problem.model, guide, *problem.tensors, num_samples=num_draws, **options)
        draws = {name: site.value for name, site in traces.sites.items() if site.kind == "latent"}
    return moments(problem, {name: value[None] for name, value in draws.items()})


def nuts_moments(make_problem: Callable[[], Problem], budget: Budget) -> tuple[Moments, float]:
    """Estimate the posterior moments by NUTS; return them with the wall seconds of NUTS, compilation included."""
    problem, start = make_problem(), time.perf_counter()
    draws = nuts(
        problem.model,
        problem.data,
        num_warmup=budget.num_transitions,
        num_samples=budget.num_transitions,
        num_chains=budget.num_chains,
        seed=0,
    )
    seconds = time.perf_counter() - start
    with isolated(0), default_dtype(torch.float64):
        return moments(problem, {name: torch.as_tensor(value) for name, value in draws.items()}), seconds


def moments(problem: Problem, draws: dict[str, Tensor]) -> Moments:
    """Estimate moments in unconstrained space from draws by site, [chains, draws, ...]."""
    return Moments.of(unconstrained(problem, draws))
