"""Mean-field, importance-weighted and annealed guides of the Bayesian GPLVM on four data sets, from one start."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.core.scores import expected_log_likelihood, held_out_log_likelihood, negative_bound, reconstruction
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import Dynamics, OverdampedLangevin, UnderdampedLangevin
from pyro_lvgp.infer import (
    CompiledELBO,
    ImportanceWeightedELBO,
    JointOptim,
    LocalELBO,
    MeanFieldELBO,
    SequentialMonteCarloELBO,
    fit,
)
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS = 1
NUM_INDUCING, BATCH_SIZE, LEARNING_RATE, CLIP_FACTOR = 30, 200, 5e-3, 10.0
COMPILED_FROM = 10_000  # steps; in shorter fits compilation takes longer than it saves
PUBLISHED: list[Row] = []
NOTES = """\
All methods have the same model, initial values (`initialize`, mean-field scales of 0.1), mini-batches, learning rate of Adam
and number of steps. The inducing values u are marginalised in all bounds. One row in ten is not used for training; "held-out
log lik." is the log likelihood of these rows, estimated by importance sampling with the same proposal for all methods (see
`benchmarks/core/scores.py`). The negative bound of a method is that of its own bound, on the training rows. "IW, S = 11" and
mean field with 11 draws evaluate as many gradients of the log joint as "annealed, K = 10". The MSE is that of the posterior
mean of f at the observed entries. Annealed guides are underdamped unless stated otherwise. All but those called "defaults"
have the settings of the paper: a first step size of 0.4 (overdamped: 0.2), transitions that are not tamed, and a base that
learns by the annealed bound alone. "SMC" resamples the chains of a row at an effective sample size below S / 2. "IW, S = 20"
evaluates as many gradients as K = 4 with S = 4. Transitions are compiled; in fits of 20 000 steps all steps of all methods are
compiled. "fit" includes compilation. In the image data three quarters of the pixels of 5 % of the rows are hidden. "hidden
RMSE" is in units of grey level / 255. All other metrics are in units in which the variance over all pixels is 1."""


@dataclass(frozen=True)
class Task:
    """Scaled data and the methods to fit.

    :param Y: rows.
    :param scale: factor from the unit of Y to that of "hidden RMSE".
    :param hidden: mask of the entries hidden from the fit.
    :param methods: methods to fit; all by default.
    """

    Y: Float[Tensor, "N D"]
    latent_dim: int
    checkpoints: tuple[int, ...]
    scale: float = 1.0
    hidden: Bool[Tensor, "N D"] | None = None
    draws: int = 1000
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """Settings of a guide and a bound.

    :param num_steps: transitions K of the annealed guide; 0 for mean field.
    :param dynamics: dynamics of its chains.
    :param step_size: initial step size.
    :param defaults: whether all other settings of the guide are its defaults, or those of the paper.
    :param learn_reverse: whether the reverse transitions are learned.
    :param num_samples: draws S of each latent.
    :param weighted: whether the draws are importance weighted, or averaged over.
    :param resampled: whether the chains of a row are resampled too.
    :param plain_kernels: whether the reverse kernels remain those of plain annealing, with a momentum of each step.
    """

    num_steps: int = 0
    dynamics: Dynamics = "underdamped"
    step_size: float = 0.4
    defaults: bool = False
    learn_reverse: bool = False
    num_samples: int = 1
    weighted: bool = False
    resampled: bool = False
    plain_kernels: bool = False

    def guide(self, model: BayesianGPLVM) -> AutoAnnealedLangevin | MeanFieldGuide:
        if self.num_steps == 0:
            return MeanFieldGuide(model)
        if self.defaults:
            return AutoAnnealedLangevin(model, compile=True, num_steps=self.num_steps)
        chain = paper_chain(model, self.dynamics) | {"learn_reverse": self.learn_reverse}
        return AutoAnnealedLangevin(model, compile=True, num_steps=self.num_steps, step_size=self.step_size, **chain)

    def loss(self) -> LocalELBO:
        bound: type[Any] = ImportanceWeightedELBO if self.weighted else MeanFieldELBO
        if self.resampled:
            bound = SequentialMonteCarloELBO
        return bound(num_samples=self.num_samples, max_plate_nesting=1)


def paper_chain(model: Callable[..., Any], dynamics: Dynamics = "underdamped") -> dict[str, Any]:
    """Arguments of an annealed guide that is the paper's: not tamed, its base learned by the annealed bound alone."""
    transition = UnderdampedLangevin if dynamics == "underdamped" else OverdampedLangevin
    return {"dynamics": transition(max_drift=math.inf), "base_guide": MeanFieldGuide(model), "base_weight": 0.0}


SEVERAL = Method(num_steps=4, num_samples=4, weighted=True)
RESAMPLING = {
    "IW, S = 20": Method(num_samples=20, weighted=True),
    "annealed, K = 4 × IW, S = 4": SEVERAL,
    "annealed, K = 4, a momentum of each step × IW, S = 4": replace(SEVERAL, learn_reverse=True, plain_kernels=True),
    "annealed, K = 4, learned reverse × IW, S = 4": replace(SEVERAL, learn_reverse=True),
    "annealed, K = 4 × SMC, S = 4": replace(SEVERAL, resampled=True),
    "annealed, K = 4, learned reverse × SMC, S = 4": replace(SEVERAL, learn_reverse=True, resampled=True),
    "annealed, K = 10 × SMC, S = 5": Method(num_steps=10, num_samples=5, weighted=True, resampled=True),
}
METHODS = {
    "mean field": Method(),
    "mean field, 11 draws": Method(num_samples=11),
    "IW, S = 5": Method(num_samples=5, weighted=True),
    "IW, S = 11": Method(num_samples=11, weighted=True),
    "annealed, K = 5": Method(num_steps=5),
    "annealed, K = 10": Method(num_steps=10),
    "annealed, K = 10, defaults": Method(num_steps=10, defaults=True),
    "annealed, K = 10, overdamped": Method(10, "overdamped", step_size=0.2),
    "annealed, K = 10, learned reverse": Method(num_steps=10, learn_reverse=True),
    "annealed, K = 10 × IW, S = 5": Method(num_steps=10, num_samples=5, weighted=True),
    "annealed, K = 10, overdamped × IW, S = 5": Method(10, "overdamped", step_size=0.2, num_samples=5, weighted=True),
    **RESAMPLING,
}


def table(name: str) -> Task:
    """Task of a table with standardised columns, in float64."""
    X = torch.as_tensor(load_dataset(name)["X"], dtype=torch.float64)
    return Task((X - X.mean(0)) / X.std(0, correction=0), latent_dim=10, checkpoints=(1000, 2000, 3000))


def images(pixels: Float[Tensor, "N D"], latent_dim: int) -> Task:
    """Task of images scaled to a total pixel variance of 1, in float32; 75 % of the pixels of 5 % of the rows are hidden."""
    scale = pixels.std().item()
    generator = torch.Generator().manual_seed(2026)  # another generator than that of the held-out rows
    rows = torch.rand(len(pixels), 1, generator=generator) < 0.05
    hidden = rows & (torch.rand(pixels.shape, generator=generator) < 0.75)
    return Task((pixels - pixels.mean()) / scale, latent_dim, (500,), scale, hidden, draws=300)


def frey() -> Task:
    """Task of the Frey faces."""
    return images(torch.as_tensor(load_dataset("frey")["X"] / 255.0, dtype=torch.float32), 20)


def ones_and_sevens() -> Task:
    """Task of ones and sevens of MNIST's test set."""
    data = load_dataset("mnist")
    chosen = (data["y_test"] == 1) | (data["y_test"] == 7)
    return images(torch.as_tensor(data["X_test"][chosen] / 255.0, dtype=torch.float32), 5)


def converged() -> Task:
    """Task of oil flow with enough steps to converge."""
    return replace(table("oilflow"), checkpoints=(20_000,), methods=CONVERGED)


PAPER = tuple(name for name, method in METHODS.items() if not (method.defaults or method.learn_reverse or name in RESAMPLING))
CONVERGED = ("mean field", "IW, S = 5", "annealed, K = 10", "annealed, K = 10 × IW, S = 5")


def with_defaults(name: str) -> Task:
    """Task of a table that compares the defaults of the annealed guide with the paper's settings."""
    return replace(table(name), methods=DEFAULTS)


def with_learned_reverse(task: Task) -> Task:
    """Task that compares learned with plain reverse transitions, at equal numbers of gradients."""
    return replace(task, methods=LEARNED_REVERSE)


def with_resampling(name: str) -> Task:
    """Task of a table that compares resampled with independent chains, and with learned reverse transitions."""
    return replace(table(name), methods=(*RESAMPLING, "annealed, K = 10 × IW, S = 5"))


LEARNED_REVERSE = (
    "annealed, K = 10, learned reverse",
    "annealed, K = 10",
    "IW, S = 11",
)
DEFAULTS = ("mean field", "IW, S = 11", "annealed, K = 10", "annealed, K = 10, defaults")
TASKS = {
    "oilflow": lambda: table("oilflow"),
    "oilflow_converged": converged,
    "wine_red": lambda: table("wine_red"),
    "oilflow_defaults": lambda: with_defaults("oilflow"),
    "wine_red_defaults": lambda: with_defaults("wine_red"),
    "oilflow_reverse": lambda: with_learned_reverse(table("oilflow")),
    "wine_red_reverse": lambda: with_learned_reverse(table("wine_red")),
    "oilflow_resampling": lambda: with_resampling("oilflow"),
    "frey": frey,
    "frey_reverse": lambda: with_learned_reverse(frey()),
    "mnist_1_7": ones_and_sevens,
    "mnist_1_7_reverse": lambda: with_learned_reverse(ones_and_sevens()),
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods on all sets, or on one, for each seed."""
    for name in [only] if only else ["oilflow"] if quick else list(TASKS):
        task = TASKS[name]()
        runs = [(seed, method) for seed in range(seeds) for method in task.methods or PAPER]
        for seed, method in tqdm(runs, desc=name, unit="fit"):
            yield from measure(name, task, method, seed=seed, checkpoints=(100,) if quick else task.checkpoints)


class Start(NamedTuple):
    """Model and guide before the fit, and the training data.

    :param rows: indices in the task of the rows of ``Y``.
    :param Y: the rows to train on, NaN where hidden.
    """

    model: BayesianGPLVM
    guide: AutoAnnealedLangevin | MeanFieldGuide
    rows: Bool[Tensor, " N"]
    Y: Float[Tensor, "B D"]


def start(task: Task, method: Method, *, seed: int) -> Start:
    """Initial model, guide and data, the same for all methods."""
    rows = torch.rand(len(task.Y), generator=torch.Generator().manual_seed(seed)) >= 0.1
    Y = task.Y[rows] if task.hidden is None else task.Y.masked_fill(task.hidden, torch.nan)[rows]
    model = BayesianGPLVM(len(Y), Y.shape[1], task.latent_dim, num_inducing=NUM_INDUCING).to(Y.dtype)
    model.initialize(Y, seed=seed)
    return Start(model, method.guide(model), rows, Y)


def optimiser() -> JointOptim:
    """Optimiser of all methods."""
    return JointOptim(torch.optim.Adam, {"lr": LEARNING_RATE, "fused": True}, clip_factor=CLIP_FACTOR)


def measure(dataset: str, task: Task, name: str, *, seed: int, checkpoints: tuple[int, ...]) -> Iterator[Measurement]:
    """Fit one method and measure it at each number of steps."""
    method = METHODS[name]
    settings: Settings = {
        "Q": task.latent_dim,
        "M": NUM_INDUCING,
        "kernel": "ARD RBF",
        "batch": BATCH_SIZE,
        "optimiser": f"fused Adam, rate {LEARNING_RATE:g}, gradients clipped at {CLIP_FACTOR:g} times their usual norm",
        "rows held out": "10 %",
        "dtype": str(task.Y.dtype).removeprefix("torch."),
    }
    with isolated(seed):
        model, guide, rows, Y = start(task, method, seed=seed)
        if method.plain_kernels:
            guide(Y)
            guide.reverse_kernels.requires_grad_(False)
        truth, hidden = task.Y[rows], torch.isnan(Y)
        loss: LocalELBO | CompiledELBO = method.loss()
        if checkpoints[-1] >= COMPILED_FROM:
            loss = CompiledELBO(loss)
        optim = optimiser()
        done, seconds = 0, 0.0
        for steps in checkpoints:
            history = fit(
                model,
                guide,
                Y,
                loss=loss,
                optim=optim,
                num_steps=steps - done,
                batch_size=BATCH_SIZE,
                seed=100_000 * seed + done,
                progress=False,
            )
            done, seconds = steps, seconds + history.seconds[-1]
            mse, hidden_rmse = reconstruction(model, guide, Y, truth, hidden)
            values = {
                "negative bound [nats/row]": negative_bound(loss, model, guide, Y),
                "reconstruction MSE": mse,
                "expected log lik. [nats/row]": expected_log_likelihood(model, guide, Y),
            }
            if task.hidden is not None:
                values["hidden RMSE"] = hidden_rmse * task.scale
            if steps == checkpoints[-1]:
                values["held-out log lik. [nats/row]"] = held_out_log_likelihood(model, guide, task.Y[~rows], draws=task.draws)
            for metric, value in values.items():
                yield Measurement(f"{dataset}, {steps} steps", name, metric, value, seconds, settings)
