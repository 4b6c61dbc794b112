"""Distributed fit in two processes, beside one process with one or two threads: step time and bound."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.contestant import Case
from benchmarks.core.joined import in_processes
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks.oilflow import standardised
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import Distributed, FitResult, ImportanceWeightedELBO, JointAdam, LocalELBO, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS = 1
LATENT_DIM, LEARNING_RATE = 10, 0.01
PUBLISHED: list[Row] = []
NOTES = """\
Two processes share the rows of each step, each with half of them in its mini-batch, and average the gradients of all
parameters by the callback `Distributed()` and gloo. MNIST: 4000 of 60 000 digits at each step, M = 50, float32; a message has
3.2 million numbers, 2.0 of q(u) and 1.2 of the latents. Oil flow: all 1000 rows, M = 30, float64, 31 thousand numbers. Q = 10.
"step" is the mean over a fit without its first tenth, "bound" the mean over the last tenth of its steps. Initial values and
learning rates are the same for all."""


class Setup(NamedTuple):
    """Numbers of processes and of threads in each."""

    processes: int
    threads: int


SETUPS = {
    "1 process": Setup(1, 1),
    "1 process, 2 threads": Setup(1, 2),
    "2 processes": Setup(2, 1),
}


def mnist() -> Case:
    """MNIST, centred, with a mean square of one."""
    Y = torch.as_tensor(load_dataset("mnist")["X_train"], dtype=torch.float32).flatten(1)
    Y = Y - Y.mean(0)
    return case(Y / Y.square().mean().sqrt(), 50, 4000, MeanFieldELBO(num_samples=1))


def oilflow() -> Case:
    """Oil flow with many importance samples."""
    return case(standardised(), 30, 1000, ImportanceWeightedELBO(num_samples=20))


def oilflow_annealed() -> Case:
    """Oil flow with a few importance samples, each at the end of an annealed chain."""
    start = case(standardised(), 30, 1000, ImportanceWeightedELBO(num_samples=5))
    return start._replace(guide=AutoAnnealedLangevin(start.model, num_steps=10))


def case(Y: Tensor, num_inducing: int, num_rows: int, bound: LocalELBO) -> Case:
    """Model and mean-field guide of the task."""
    model = BayesianGPLVM(len(Y), Y.shape[1], LATENT_DIM, num_inducing=num_inducing).to(Y.dtype).initialize(Y)
    return Case(model, MeanFieldGuide(model), bound, (Y,), num_rows, LEARNING_RATE)


TASKS: dict[str, Callable[[], Case]] = {
    "MNIST, mean field": mnist,
    "oil flow, IW, S = 20": oilflow,
    "oil flow, annealed, K = 10 × IW, S = 5": oilflow_annealed,
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all numbers of processes and threads for each seed, by task."""
    num_steps = 10 if quick else 100
    for task in [only] if only else list(TASKS):
        for name, setup in tqdm(SETUPS.items(), desc=task, unit="setup"):
            for seed in range(seeds):
                history = fitted(setup, task, num_steps=num_steps, seed=seed)
                after, tenth = history.seconds, num_steps // 10
                values = {
                    "step [ms]": 1e3 * (after[-1] - after[tenth - 1]) / (num_steps - tenth),
                    "bound [nats/entry]": history.bounds_per_entry[-tenth:].mean().item(),
                }
                settings: Settings = {"steps": num_steps, "optimiser": f"fused Adam, rate {LEARNING_RATE:g}"}
                for metric, value in values.items():
                    yield Measurement(task, name, metric, value, after[-1], settings)


def fitted(setup: Setup, task: str, *, num_steps: int, seed: int) -> FitResult:
    """Result of a fit in new processes."""
    return in_processes(partial(fit_one, task, num_steps, seed), setup.processes, threads=setup.threads)[0]


def fit_one(task: str, num_steps: int, seed: int, rank: int) -> FitResult:
    """Fit in one of the processes."""
    torch.manual_seed(seed)
    start = TASKS[task]()
    assert start.batch_size is not None
    return fit(
        start.model,
        start.guide,
        *start.args,
        loss=start.bound,
        num_steps=num_steps,
        batch_size=start.batch_size // torch.distributed.get_world_size(),
        optim=JointAdam(lr=start.learning_rate),
        seed=seed,
        progress=False,
        callbacks=[Distributed()],
    )
