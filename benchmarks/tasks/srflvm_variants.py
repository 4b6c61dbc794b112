"""Random-feature LVM with two latents: effect of starts, sizes, back-constraints, likelihoods and annealing, beside t-SNE."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.isolated import timed
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks import srflvm
from benchmarks.tasks.srflvm import ACCURACY, LATENT_DIM, Latents, Task, tsne
from pyro_lvgp.conjugate.feature_regression import from_natural
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit
from pyro_lvgp.models import RandomFeatureLVM
from pyro_lvgp.models._latent_rows import Guide

NUM_THREADS = 1
TASKS = {name: srflvm.TASKS[name] for name in ("mnist", "newsgroups", "cifar", "montreal")}
NUM_STEPS, LEARNING_RATE, CHAIN_STEPS, CHAIN_RATE, NUM_DRAWS, NUM_NEIGHBOURS = 500, 0.02, 5, 0.005, 100, 10
FROZEN, QUICK_STEPS, QUICK_ROWS = 0.4, 2, 120
BOUND, CHOSEN = "negative bound per row [nats]", "all of these but logarithms, chosen by the bound"
PUBLISHED: list[Row] = []
NOTES = """\
`RandomFeatureLVM` with a Gaussian likelihood as in the benchmark srflvm, initialised by t-SNE, and variants that change one
setting; data and folds are the same. "latents held at first" freezes the means of the latents at their initial values for 200
of the 500 steps. "kernel back-constraint": means of the latents are a kernel machine of the data, exp(−d² / 2 s s′) with
distances d and the distance s to the tenth neighbour. "shared weights" have a variational posterior, updated by natural
gradients, instead of their exact posterior. "annealed" fits shared weights in the first half of its steps; in the second half
weights and frequencies are frozen, and chains of five Langevin transitions for each row are trained, whose draws are averaged.
Logarithms are log(1 + count), minus their means, divided by one number; t-SNE has the same data. Bounds are means over the
last fifty steps; bounds of logarithms are of other data than the rest. The last row has for each seed the fit with the highest
bound, which does not use labels."""

Fit = tuple[Latents, float]  # posterior means, and minus the bound per row


class BackConstraint(nn.Module):
    """Latents whose means are a kernel machine of the data of their row, so that close rows have close latents.

    m_n = Σ_j exp(−|y_n − y_j|² / 2 s_n s_j) A_j, s being the distance to the tenth neighbour.

    Lawrence and Quiñonero-Candela (2006), "Local distance preservation in the GP-LVM through back constraints".

    :param Y: all rows.
    :param X: initial means.
    :param scale: initial standard deviations, one for each row.
    """

    kernel: Tensor

    def __init__(self, Y: Float[Tensor, "N D"], X: Float[Tensor, "N Q"], scale: float = 0.1):
        super().__init__()
        distances = torch.cdist(Y, Y)
        # More than ten rows may be equal, with distances of zero.
        reach = distances.kthvalue(NUM_NEIGHBOURS + 1, dim=1).values.clamp_min(1e-3)
        kernel = (-0.5 * distances.square() / (reach[:, None] * reach)).exp()
        self.register_buffer("kernel", kernel)
        self.weights = nn.Parameter(torch.linalg.solve(kernel + 1e-3 * torch.eye(len(Y)), X))
        self.raw_scale = nn.Parameter(torch.full_like(X, scale).expm1().log())

    def forward(self, Y: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernel @ self.weights, nn.functional.softplus(self.raw_scale)


def collapsed(
    task: Task,
    seed: int,
    num_steps: int,
    *,
    layout: bool = True,
    constrained: bool = False,
    frozen: float = 0.0,
    **sizes: Any,
) -> Fit:
    """Fit with the exact posterior of the weights; the means of the latents are frozen in the first share of the steps."""
    Y, model = start(task, seed, layout=layout, **sizes)
    encoder = BackConstraint(Y, model.initial_values["X"]) if constrained else None
    guide = RandomFeatureGuide(model, frequencies="gaussian", encoders={"X": encoder}, seed=seed)

    def train(number: int) -> list[float]:
        blocks = guide.blocks(lr=LEARNING_RATE)
        return fit(model, guide, Y, optim=blocks, num_steps=number, seed=seed, progress=False).losses

    first = round(frozen * num_steps)
    if first:
        guide(Y)
        guide.X.loc_unconstrained.requires_grad_(False)
        train(first)
        guide.X.loc_unconstrained.requires_grad_(True)
    losses = train(num_steps - first)
    return guide.latents(Y).mean.detach().numpy(), last(losses) / len(Y)


def shared(task: Task, seed: int, num_steps: int) -> Fit:
    """Fit with a variational posterior of the weights."""
    Y, _, guide, losses = fit_shared(task, seed, num_steps)
    return guide.latents().mean.detach().numpy(), last(losses) / len(Y)


def annealed(task: Task, seed: int, num_steps: int) -> Fit:
    """Fit with an annealed guide in the second half of the steps, initialised by the first half."""
    Y, model, plain, _ = fit_shared(task, seed, num_steps // 2)

    def weights_and_frequencies(y: Tensor, idx: Tensor | None = None) -> dict[str, Tensor]:
        values = {name: pyro.sample(name, q) for name, q in known.items()}
        with guide.plates["outputs"]:
            return values | {"a": pyro.sample("a", q_weights)}

    with torch.no_grad():
        known: dict[str, Any] = {
            "alpha": dist.Gamma(plain.alpha.shape, plain.alpha.rate),
            "v": dist.Beta(plain.v.a, plain.v.b).to_event(1),
            "omega": dist.Normal(plain.omega.loc, plain.omega.scale).to_event(2),
        }
        mean = from_natural(plain.a.linear, plain.a.precision).mean
        q_weights = dist.MultivariateNormal(mean, precision_matrix=plain.a.precision, validate_args=False)
    base = MeanFieldGuide(model)
    guide = AutoAnnealedLangevin(
        model, sites=["X"], num_steps=CHAIN_STEPS, step_size=0.2, base_guide=base, global_guide=weights_and_frequencies
    )
    guide(Y)
    with torch.no_grad():
        base.locs.X, base.scales.X = plain.latents().mean.clone(), plain.latents().stddev.clone()
    losses = learn(model, guide, Y, num_steps=num_steps - num_steps // 2, optim=JointAdam(lr=CHAIN_RATE), seed=seed)
    return guide.sample_posterior(NUM_DRAWS, Y)["X"].mean(0).numpy(), last(losses) / len(Y)


def fit_shared(task: Task, seed: int, num_steps: int) -> tuple[Tensor, RandomFeatureLVM, RandomFeatureGuide, list[float]]:
    """Data, model, guide with a variational posterior of the weights, and losses."""
    Y, model = start(task, seed)
    guide = RandomFeatureGuide(model, weights="shared", seed=seed)
    blocks = guide.blocks(lr=LEARNING_RATE, damping=1.0)
    return Y, model, guide, learn(model, guide, Y, optim=blocks, num_steps=num_steps, seed=seed)


def learn(model: RandomFeatureLVM, guide: Guide, Y: Tensor, **options: Any) -> list[float]:
    """Fit by the mean-field bound; return the losses."""
    bound = MeanFieldELBO(num_samples=1, max_plate_nesting=1)
    return fit(model, guide, Y, loss=bound, progress=False, **options).losses


def start(task: Task, seed: int, *, layout: bool = True, **sizes: Any) -> tuple[Tensor, RandomFeatureLVM]:
    """Data, and a model initialised by t-SNE or by PCA."""
    Y = torch.as_tensor(task.standardised, dtype=torch.float32)
    latents = torch.as_tensor(tsne(task, seed, 0)) if layout else None
    options: dict[str, Any] = {"num_components": 20, "num_frequencies": 100, "lengthscale": 0.5} | sizes
    N, D = Y.shape
    model = RandomFeatureLVM(N, D, LATENT_DIM, seed=seed, **options)
    return Y, model.initialize(Y, latents=latents, seed=seed)


def last(losses: list[float]) -> float:
    """Mean of the last losses of a fit."""
    return float(np.mean(losses[-50:]))


@dataclass(frozen=True)
class Variant:
    """Variant of the fit.

    :param embed: function of task, seed and number of steps.
    :param num_steps: number of steps of Adam.
    :param logarithms: whether the data are log(1 + count).
    """

    embed: Callable[[Task, int, int], Fit]
    num_steps: int = NUM_STEPS
    logarithms: bool = False


def in_logarithms(task: Task) -> Task:
    """Logarithms log(1 + count) of the counts, so that large counts do not dominate."""
    return replace(task, Y=np.log1p(task.Y), image=True)


MANY: dict[str, Any] = {"num_frequencies": 400, "lengthscale": 0.25}


def variants(task: Task) -> dict[str, Variant]:
    """Variants applicable to the data."""
    found = {
        "as in srflvm": Variant(collapsed),
        "from PCA": Variant(partial(collapsed, layout=False)),
        "three times the components": Variant(partial(collapsed, num_components=60)),
        "200 frequencies": Variant(partial(collapsed, num_frequencies=200)),
        "200 frequencies, half the lengthscale": Variant(partial(collapsed, num_frequencies=200, lengthscale=0.25)),
        "400 frequencies, half the lengthscale": Variant(partial(collapsed, **MANY)),
        "latents held at first": Variant(partial(collapsed, frozen=FROZEN)),
        "400 frequencies, half the lengthscale, latents held at first": Variant(partial(collapsed, frozen=FROZEN, **MANY)),
        "kernel back-constraint": Variant(partial(collapsed, constrained=True)),
        "shared weights": Variant(shared, 2 * NUM_STEPS),
        "shared weights, annealed": Variant(annealed, 2 * NUM_STEPS),
    }
    if task.counts:
        found["logarithms"] = Variant(collapsed, logarithms=True)
        found["logarithms, 400 frequencies, half the lengthscale"] = Variant(partial(collapsed, **MANY), logarithms=True)
    return found


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all variants on all sets, or on one, for each seed; if quick, with a few steps on some of the rows of one."""
    for name in [only] if only else list(TASKS)[: 1 if quick else None]:
        task = TASKS[name]().some(QUICK_ROWS) if quick else TASKS[name]()
        layouts = {"t-SNE itself": task} | ({"t-SNE itself, logarithms": in_logarithms(task)} if task.counts else {})
        for seed in tqdm(range(seeds), desc=name, unit="seed"):
            for method, seen in layouts.items():
                X, seconds = timed(partial(tsne, seen, seed, 0), seed=seed)
                yield Measurement(name, method, ACCURACY, task.score(X, seed=seed)[ACCURACY], seconds, {})
            fits = []
            for method, variant in variants(task).items():
                num_steps = min(variant.num_steps, QUICK_STEPS) if quick else variant.num_steps
                fitted = measure(name, task, method, replace(variant, num_steps=num_steps), seed=seed)
                yield from fitted
                if not variant.logarithms:
                    fits.append(fitted)
            total = sum(accuracy.seconds or 0.0 for accuracy, _ in fits)
            for measured in min(fits, key=lambda fitted: fitted[1].value):
                yield replace(measured, method=CHOSEN, seconds=total, settings={})


def measure(dataset: str, task: Task, method: str, variant: Variant, *, seed: int) -> tuple[Measurement, Measurement]:
    """Fit once; accuracy and bound."""
    seen = in_logarithms(task) if variant.logarithms else task
    (X, loss), seconds = timed(lambda: variant.embed(seen, seed, variant.num_steps), seed=seed)
    settings = Settings(steps=variant.num_steps)
    accuracy = Measurement(dataset, method, ACCURACY, task.score(X, seed=seed)[ACCURACY], seconds, settings)
    return accuracy, Measurement(dataset, method, BOUND, loss, seconds, settings)
