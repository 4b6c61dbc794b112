"""Gap between the bounds of annealed chains and the evidence of simulated data, with plain and learned reverse transitions."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from pyro import poutine
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks.annealed import BATCH_SIZE, LEARNED_REVERSE, METHODS, NUM_INDUCING, Method, optimiser, start, table
from pyro_lvgp.diagnostics import bound_sandwich, log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import Callback, LRSchedule, fit
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS = 1
NUM_ROWS, NUM_STEPS, NUM_CHAINS, NUM_REPEATS = 300, 3000, 300, 30
PLAIN = "annealed, K = 10"
TASKS: dict[str, Callable[[], list[Callback]]] = {"constant": list, "falling": lambda: [LRSchedule("cosine")]}
PUBLISHED: list[Row] = []
NOTES = f"""\
A Bayesian GPLVM is fitted to oil flow by "annealed, K = 10", as in `annealed`, and simulates {NUM_ROWS} rows at the medians
of its inducing values u. Its parameters and u are then fixed, and guides of the latents are fitted to the simulated rows, all
from N(0, 0.1² I), with the settings of `annealed` and rates that are constant, as there, or fall along a cosine to zero. Since
the latents that generated the rows are exact draws from their posterior, chains that run backwards from them bound the
evidence from above (bidirectional Monte Carlo). "bound" is what a fit maximises: the expected log weight of one chain, or the
importance-weighted bound of eleven draws, which evaluates as many gradients. "evidence" are the lower and the upper bound by
{NUM_CHAINS} chains of the method. "gap closed" is the share of the gap between the bound of "{PLAIN}" and the smallest upper
bound that a method closes."""


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Fit and bound all methods to data simulated from one model, for each seed and each schedule, or one."""
    num_steps = 3 if quick else NUM_STEPS
    settings: Settings = {"rows": NUM_ROWS, "steps": num_steps, "batch": BATCH_SIZE, "chains": NUM_CHAINS}
    for seed in tqdm(range(seeds), unit="seed"):
        with isolated(seed):
            model, u = fitted_model(num_steps, seed)
            truth = poutine.trace(poutine.condition(model, {"u": u})).get_trace(None)
            Y, X = (cast(Tensor, truth.nodes[name]["value"]).detach() for name in ("y", "X"))
        for schedule in [only] if only else TASKS:
            dataset, bounds, uppers, seconds = f"simulated, {schedule} rates", {}, [], {}
            for name in LEARNED_REVERSE:
                with isolated(seed):
                    guide, seconds[name] = fitted_guide(model, METHODS[name], Y, u, num_steps, seed, TASKS[schedule]())
                    bounds[name] = bound(model, guide, Y, u, METHODS[name].num_samples)
                    if isinstance(guide, AutoAnnealedLangevin):
                        evidence = bound_sandwich(model, guide, Y, latents={"u": u, "X": X}, num_samples=NUM_CHAINS)
                        uppers.append(evidence.upper.mean().item())
                        for side, value in (("lower", evidence.lower.mean().item()), ("upper", uppers[-1])):
                            yield Measurement(dataset, name, f"evidence, {side} [nats/row]", value, seconds[name], settings)
            gap = min(uppers) - bounds[PLAIN]
            for name, value in bounds.items():
                yield Measurement(dataset, name, "bound [nats/row]", value, seconds[name], settings)
                yield Measurement(dataset, name, "gap closed", (value - bounds[PLAIN]) / gap, seconds[name], settings)


def fitted_model(num_steps: int, seed: int) -> tuple[BayesianGPLVM, Float[Tensor, "D M"]]:
    """Fit a GPLVM to oil flow by plain chains; return a model of its parameters that simulates rows, and the medians of u."""
    method = METHODS[PLAIN]
    fitted, guide, _, Y = start(table("oilflow"), method, seed=seed)
    options: dict[str, Any] = {"num_steps": num_steps, "batch_size": BATCH_SIZE, "seed": seed, "progress": False}
    fit(fitted, guide, Y, loss=method.loss(), optim=optimiser(), **options)
    sizes = NUM_ROWS, fitted.data_dim, fitted.latent_dim
    model = BayesianGPLVM(*sizes, num_inducing=NUM_INDUCING, likelihood_term="fitc").to(Y.dtype)
    model.load_state_dict(fitted.state_dict())
    return model.requires_grad_(False), guide.median(Y)["u"].detach()


def fitted_guide(
    model: BayesianGPLVM,
    method: Method,
    Y: Float[Tensor, "N D"],
    u: Float[Tensor, "D M"],
    num_steps: int,
    seed: int,
    callbacks: Sequence[Callback] = (),
) -> tuple[AutoAnnealedLangevin | MeanFieldGuide, float]:
    """Fit a guide of the latents of a fixed model with known u; return it with the seconds of the fit."""
    model.initial_values = {"u": u, "X": Y.new_zeros(len(Y), model.latent_dim)}
    guide = method.guide(model)
    guide(Y)
    base = guide.base_guide if isinstance(guide, AutoAnnealedLangevin) else guide
    base.scales.u = 1e-4 * torch.eye(u.shape[-1], dtype=Y.dtype).expand_as(base.scales.u)
    for parameters in (base.locs, base.scales):
        parameters.u_unconstrained.requires_grad_(False)
    options: dict[str, Any] = {"num_steps": num_steps, "batch_size": BATCH_SIZE, "seed": seed, "progress": False}
    history = fit(model, guide, Y, loss=method.loss(), optim=optimiser(), callbacks=callbacks, **options)
    return guide, history.seconds[-1]


@torch.no_grad()
def bound(
    model: BayesianGPLVM, guide: Callable[..., Any], Y: Float[Tensor, "N D"], u: Float[Tensor, "D M"], num_samples: int
) -> float:
    """Importance-weighted bound of a row given u, in nats, averaged over repeats."""
    given = (poutine.block(poutine.condition(part, {"u": u}), hide=["u"]) for part in (model, guide))
    log_w = log_weights(*given, Y, num_samples=NUM_REPEATS * num_samples, local_plate=model.local_plate)
    return (log_w.unflatten(0, (NUM_REPEATS, num_samples)).logsumexp(1) - math.log(num_samples)).mean().item()
