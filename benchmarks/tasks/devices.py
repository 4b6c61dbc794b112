"""Steps on the CPU and on a GPU, with and without compilation: milliseconds and speed-up."""

import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.contestant import Case, Contestant
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks.compiled import contestants
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, LocalELBO, MeanFieldELBO, StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

NUM_THREADS = os.cpu_count() or 1
LEARNING_RATE = 1e-3
PUBLISHED: list[Row] = []
NOTES = """\
Step times are medians of the steps of `fit` in float32, with all cores of the CPU. A step ends when its loss is known on the
CPU. "times fewer" is the first time divided by the second. Data are random: B rows in a mini-batch of N, with D columns;
GP-VAEs have all points at each step. "compile" is the time of the slowest compiled step minus the median."""


def run(*, quick: bool, seeds: int, only: str | None = None, device: str = "cuda") -> Iterator[Measurement]:
    """Measure all cases for each seed, or those of one part."""
    num_steps = 4 if quick else 60
    for seed in range(seeds):
        for task in [only] if only else list(TASKS):
            measured, cases = TASKS[task]
            for name in tqdm(cases, desc=f"{task}, seed {seed}", unit="case"):
                yield from measured(name, num_steps=num_steps, seed=seed, device=device)


def measure(name: str, *, num_steps: int, seed: int, device: str) -> Iterator[Measurement]:
    """Time steps on the CPU and on the device.

    :param name: name of the case, a key of ``CASES``.
    :param num_steps: number of steps on the device; a quarter of them on the CPU.
    :param seed: seed of data, initial values and fit.
    :param device: device to compare with the CPU.
    """
    here, there = (Contestant(seeded(seed)(CASES[name]), device=place) for place in ("cpu", device))
    slow, fast = step_seconds(here, num_steps // 4, seed=seed), step_seconds(there, num_steps, seed=seed)
    values = {"CPU [ms]": 1e3 * slow, f"{device} [ms]": 1e3 * fast, "times fewer": slow / fast}
    yield from measurements("plain", name, values, sum(there.seconds))


def measure_compiled(name: str, *, num_steps: int, seed: int, device: str, backend: str = "inductor") -> Iterator[Measurement]:
    """Time steps on the device without and with compilation.

    :param backend: backend of :class:`~pyro_lvgp.infer.CompiledELBO`.
    """
    plain, compiled = contestants(CASES[name], seed=seed, backend=backend, device=device)
    slow, fast = (step_seconds(contestant, num_steps, seed=seed) for contestant in (plain, compiled))
    values = {f"{device} [ms]": 1e3 * slow, f"{device}, compiled [ms]": 1e3 * fast, "times fewer": slow / fast}
    yield from measurements("compiled", name, values | {"compile [s]": compiled.compile_seconds}, sum(compiled.seconds))


def step_seconds(contestant: Contestant, num_steps: int, *, seed: int) -> float:
    """Median seconds of a step."""
    return statistics.median(contestant.train(num_steps, seed=seed))


def measurements(dataset: str, name: str, values: dict[str, float], seconds: float) -> Iterator[Measurement]:
    """Measurements of one fit."""
    settings: Settings = {"optimiser": f"fused Adam, rate {LEARNING_RATE:g}", "dtype": "float32"}
    for metric, value in values.items():
        yield Measurement(dataset, name, metric, value, seconds, settings)


def gplvm(
    num_data: int,
    data_dim: int,
    num_inducing: int,
    batch_size: int,
    bound: LocalELBO,
    guide: Callable[[BayesianGPLVM], Any] = MeanFieldGuide,
) -> Case:
    """Bayesian GPLVM with ten latent dimensions."""
    Y = waves(torch.randn(num_data, 2), data_dim)
    model = BayesianGPLVM(num_data, data_dim, 10, num_inducing=num_inducing).initialize(Y)
    return Case(model, guide(model), bound, (Y,), batch_size, LEARNING_RATE)


def gpvae(num_points: int, num_inducing: int | None = None) -> Case:
    """GP-VAE of one series of 20 channels, with three latent processes; sparse if a number of inducing points is given."""
    x = torch.linspace(0.0, 1.0, num_points)[:, None]
    Y = waves(20.0 * x, 20)
    kernel, decoder = RBF(1, lengthscale=torch.full((3, 1), 0.05), batch_shape=(3,)), MLP(3, 20, (20,))
    encoder = IndexNet(20, 3)
    if num_inducing is None:
        dense = GPVAE(kernel, decoder)
        return Case(dense, StructuredGPGuide(dense, encoders={"f": encoder}), StructuredELBO(), (x, Y), None, LEARNING_RATE)
    sparse = SparseGPVAE(kernel, decoder, torch.linspace(0.0, 1.0, num_inducing)[:, None])
    return Case(
        sparse, SparseStructuredGPGuide(sparse, encoders={"u": encoder}), StructuredELBO(), (x, Y), None, LEARNING_RATE
    )


def waves(x: Tensor, data_dim: int) -> Tensor:
    """Smooth functions of x with noise."""
    return torch.sin(nn.functional.linear(x, torch.randn(data_dim, x.shape[1]))) + 0.1 * torch.randn(len(x), data_dim)


def annealed(model: BayesianGPLVM) -> AutoAnnealedLangevin:
    """Annealed guide of ten transitions."""
    return AutoAnnealedLangevin(model, num_steps=10)


SMALL, LARGE = (1000, 12, 30), (60_000, 784, 50)
CASES: dict[str, Callable[[], Case]] = {
    "GPLVM, mean field, B = 200, N = 1000, D = 12, M = 30": lambda: gplvm(*SMALL, 200, MeanFieldELBO()),
    "GPLVM, IW, S = 5, B = 200, N = 1000, D = 12, M = 30": lambda: gplvm(*SMALL, 200, ImportanceWeightedELBO(num_samples=5)),
    "GPLVM, annealed, K = 10, B = 200, N = 1000, D = 12, M = 30": lambda: gplvm(
        *SMALL, 200, MeanFieldELBO(num_samples=1), annealed
    ),
    "GPLVM, mean field, B = 1000, N = 60 000, D = 784, M = 50": lambda: gplvm(*LARGE, 1000, MeanFieldELBO()),
    "GPLVM, annealed, K = 10, B = 1000, N = 60 000, D = 784, M = 50": lambda: gplvm(
        *LARGE, 1000, MeanFieldELBO(num_samples=1), annealed
    ),
    "GP-VAE, N = 250, D = 20": lambda: gpvae(250),
    "GP-VAE, N = 2000, D = 20": lambda: gpvae(2000),
    "GP-VAE, sparse, N = 20 000, D = 20, M = 100": lambda: gpvae(20_000, 100),
}
COMPILED = [name for name in CASES if "N = 1000" in name and "IW" not in name]
TASKS: dict[str, tuple[Callable[..., Iterator[Measurement]], list[str]]] = {
    "plain": (measure, list(CASES)),
    "compiled": (measure_compiled, COMPILED),
}
