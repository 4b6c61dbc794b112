"""Time to a fitted Bayesian GPLVM: all seconds of 3000 steps with the defaults, eagerly, in NumPyro and in GPyTorch."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import numpyro
import pyro
import torch
from jaxtyping import Float
from pyro.infer import SVI, JitTrace_ELBO
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import wall_seconds
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.gpytorch_gplvm import GPyTorchGPLVM
from benchmarks.peers.numpyro_dais import NumPyroDAIS
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS, NUM_SEEDS = 1, 1
DATA_DIM, LATENT_DIM, NUM_INDUCING, LEARNING_RATE = 12, 10, 25, 5e-3
PUBLISHED: list[Row] = []
NOTES = """\
"all in" are the wall seconds from the data to the end of the last step: initial values, recording or compilation, and
steps. "step" is the median of the steps, "before" the rest of the time. "pyro_lvgp" is `fit` with its defaults, which runs
the steps as a graph without Python; "eager" is `fit(compile=False)`; both give the same parameters. The mean-field fit is also
compiled by `fit(compile=True)`, by Pyro's `JitTrace_ELBO`, and by `torch.compile` of the loss alone. NumPyro compiles its
step, whose chains are those of `AutoSemiDAIS` (corrected in two places, see `benchmarks/peers/numpyro_dais.py`). All methods
take the same initial values of `initialize`, one draw at each step, and float64. Methods run one after the other; `taskset`
gives each one core, since JAX takes all otherwise.
The data are Gaussian: three factors and noise of variance 0.01."""


class Task(NamedTuple):
    """Sizes of a fit.

    :param num_data: number of rows.
    :param batch_size: rows of a step; None for all.
    :param num_transitions: length K of the chains; 0 for a mean-field guide.
    """

    num_data: int
    batch_size: int | None
    num_transitions: int


TASKS = {
    "mean field, N = 1000": Task(1000, None, 0),
    "annealed, K = 5, N = 100": Task(100, None, 5),
    "annealed, K = 5, N = 1000": Task(1000, None, 5),
    "annealed, K = 10, N = 1000": Task(1000, None, 10),
    "annealed, K = 5, 200 of 10 000 rows": Task(10_000, 200, 5),
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods for each seed on all tasks, or on one."""
    num_steps = 20 if quick else 3000
    for seed in range(seeds):
        for name in tqdm([only] if only else list(TASKS), desc=f"speed, seed {seed}", unit="task"):
            yield from measure(name, num_steps=num_steps, seed=seed)


def measure(name: str, *, num_steps: int, seed: int) -> Iterator[Measurement]:
    """Measure all methods on a task.

    :param name: name of the task.
    :param num_steps: number of steps.
    :param seed: seed of data, initial values and steps.
    """
    task, Y = TASKS[name], factors(TASKS[name].num_data, seed=seed)
    settings: Settings = {"Q": LATENT_DIM, "M": NUM_INDUCING, "D": DATA_DIM, "steps": num_steps, "dtype": "float64"}
    for method, fitted in methods(task).items():
        values = seconds_of(partial(fitted, Y, task, num_steps, seed), num_steps)
        for metric, value in values.items():
            yield Measurement(name, method, metric, value, values["all in [s]"], settings)


def seconds_of(fitted: Callable[[], list[float]], num_steps: int) -> dict[str, float]:
    """Wall seconds of a fit, of one of its steps, and of all before the first step.

    :param fitted: makes the fit, and returns the wall seconds of its steps.
    :param num_steps: number of steps.
    """
    start = time.perf_counter()
    median = statistics.median(fitted())
    total = time.perf_counter() - start
    return {"all in [s]": total, "step [ms]": 1e3 * median, "before [s]": total - num_steps * median}


Fit = Callable[[Float[Tensor, "N D"], Task, int, int], list[float]]


def methods(task: Task) -> dict[str, Fit]:
    """Return the methods that can do a task, by name; each returns the wall seconds of its steps."""
    found: dict[str, Fit] = {
        "pyro_lvgp": lambda *args: ours(*args, compile="torchscript"),
        "pyro_lvgp, eager": lambda *args: ours(*args, compile=False),
        f"NumPyro {numpyro.__version__}": in_numpyro,
    }
    if not task.num_transitions:
        found["pyro_lvgp, compile=True"] = lambda *args: ours(*args, compile=True)
        found["Pyro, JitTrace_ELBO"] = by_trace
        found["torch.compile of the loss"] = by_dynamo
        found[f"GPyTorch {gpytorch.__version__}"] = in_gpytorch
    return found


def factors(num_data: int, *, seed: int) -> Float[Tensor, "N D"]:
    """Draw data from three factors and noise, with columns of mean 0."""
    with seeded(seed):
        Y = torch.randn(num_data, 3) @ torch.randn(3, DATA_DIM) + 0.1 * torch.randn(num_data, DATA_DIM)
    return (Y - Y.mean(0)).double()


def ours(Y: Float[Tensor, "N D"], task: Task, num_steps: int, seed: int, *, compile: Any) -> list[float]:
    """Fit our model; ``compile="torchscript"`` is what the default does in fits of 1000 steps or more."""
    pyro.clear_param_store()
    model = started(Y, seed)
    is_annealed = task.num_transitions > 0
    guide = AutoAnnealedLangevin(model, num_steps=task.num_transitions) if is_annealed else MeanFieldGuide(model)
    history = fit(
        model,
        guide,
        Y,
        loss=MeanFieldELBO(num_samples=1),
        optim=JointAdam(LEARNING_RATE),
        num_steps=num_steps,
        batch_size=task.batch_size,
        compile=compile,
        seed=seed,
        progress=False,
    )
    return np.diff(history.seconds).tolist()


def by_trace(Y: Float[Tensor, "N D"], task: Task, num_steps: int, seed: int) -> list[float]:
    """Fit our model and guide by Pyro's loss that is traced by PyTorch."""
    pyro.clear_param_store()
    model = started(Y, seed)
    loss = JitTrace_ELBO(max_plate_nesting=1, ignore_jit_warnings=True)
    svi = SVI(model, MeanFieldGuide(model), JointAdam(LEARNING_RATE), loss)
    with seeded(seed):
        return [wall_seconds(partial(svi.step, Y)) for _ in range(num_steps)]


def by_dynamo(Y: Float[Tensor, "N D"], task: Task, num_steps: int, seed: int) -> list[float]:
    """Fit our model and guide by a loop whose loss ``torch.compile`` compiles; its parts without a graph stay in Python."""
    pyro.clear_param_store()
    model = started(Y, seed)
    guide, bound = MeanFieldGuide(model), MeanFieldELBO(num_samples=1, max_plate_nesting=1)
    guide(Y)
    parameters = {id(part): part for module in (model, guide) for part in module.parameters()}
    optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE)
    compiled = torch.compile(partial(bound.differentiable_loss, model, guide))

    def step() -> None:
        optimizer.zero_grad()
        compiled(Y).backward()
        optimizer.step()

    with seeded(seed):
        return [wall_seconds(step) for _ in range(num_steps)]


def in_numpyro(Y: Float[Tensor, "N D"], task: Task, num_steps: int, seed: int) -> list[float]:
    """Fit the same model in NumPyro."""
    peer = NumPyroDAIS(
        Y,
        started(Y, seed),
        num_steps=max(task.num_transitions, 1),
        learning_rate=LEARNING_RATE,
        batch_size=task.batch_size,
        guide="semi" if task.num_transitions else "mean-field",
    )
    return peer.train(num_steps, seed=seed)


def in_gpytorch(Y: Float[Tensor, "N D"], task: Task, num_steps: int, seed: int) -> list[float]:
    """Fit the same model with a mean-field guide in GPyTorch."""
    model = started(Y, seed)
    guide = MeanFieldGuide(model)
    guide(Y)
    peer = GPyTorchGPLVM(Y, model, guide, batch_size=task.batch_size or len(Y), learning_rate=LEARNING_RATE)
    return peer.train(num_steps, seed=seed)


def started(Y: Float[Tensor, "N D"], seed: int) -> BayesianGPLVM:
    """Return a model with initial values."""
    return BayesianGPLVM(len(Y), DATA_DIM, LATENT_DIM, num_inducing=NUM_INDUCING).double().initialize(Y, seed=seed)
