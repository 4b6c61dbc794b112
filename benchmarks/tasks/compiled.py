"""Compiled steps of models, guides and bounds: milliseconds with and without compilation, and steps until it pays."""

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache
from tqdm import tqdm

from benchmarks.core.contestant import Case, Contestant
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.tasks import gpvae as gpvae_benchmark
from benchmarks.tasks.oilflow import standardised
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import CompiledELBO, ImportanceWeightedELBO, LocalELBO, MeanFieldELBO, StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

NUM_THREADS = 1
LEARNING_RATE, BATCH_SIZE = 1e-3, 200
PUBLISHED: list[Row] = []
NOTES = """\
"steps": steps of each model, guide and bound with and without `CompiledELBO`. Step times are medians of the steps of `fit`;
blocks of steps alternate between the two. "compile" is the time of the slowest step minus the median, with an empty cache, and
"pays after" the number of steps whose savings equal that time. The data of the Bayesian GPLVM are oil flow: 1000 × 12,
mini-batches of 200, Q = 10, M = 30. The data of the GP-VAEs are the EEG: 256 × 7 with gaps, Q = 3, IndexNet, a decoder with
one layer of 20; mini-batches of 100, as in the thesis, or all points and 30 inducing points. The user's own model is Poisson
factorisation of 500 × 30 counts with a latent of 5 dimensions for each row, on mini-batches of 100 rows.

"chains": annealed guides of the Bayesian GPLVM, all rows at each step, in float32: not compiled; "transition", with one
transition compiled by `AutoAnnealedLangevin(compile=True)`; "all", with the whole step compiled by `CompiledELBO`; and "both",
where the compiled step calls one compiled transition repeatedly."""


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all cases for each seed, or one part."""
    num_steps, block = (6, 3) if quick else (600, 100)
    for seed in range(seeds):
        for task in [only] if only else list(TASKS):
            measured, cases = TASKS[task]
            for case in tqdm(cases, desc=f"{task}, seed {seed}", unit="case"):
                yield from measured(case, num_steps=num_steps, block=block, seed=seed)


def measure(name: str, *, num_steps: int, block: int, seed: int, backend: str = "inductor") -> Iterator[Measurement]:
    """Time steps of a case without and with compilation, in turn.

    :param name: name of the case, a key of ``CASES``.
    :param num_steps: number of steps of each contestant.
    :param block: steps of one contestant before the other takes over.
    :param seed: seed of the initial values and of the fit.
    :param backend: backend of :class:`~pyro_lvgp.infer.CompiledELBO`.
    """
    plain, compiled = contestants(CASES[name], seed=seed, backend=backend)
    slow, fast = take_turns([plain, compiled], num_steps=num_steps, block=block, seed=seed)
    values = {
        "step [ms]": 1e3 * slow,
        "compiled [ms]": 1e3 * fast,
        "ratio": slow / fast,
        "compile [s]": compiled.compile_seconds,
        "pays after [steps]": compiled.compile_seconds / (slow - fast) if fast < slow else math.inf,
    }
    settings: Settings = {"steps": num_steps, "optimiser": f"fused Adam, rate {LEARNING_RATE:g}", "dtype": "float64"}
    for metric, value in values.items():
        yield Measurement("steps", name, metric, value, sum(compiled.seconds), settings)


def measure_chain(length: int, *, num_steps: int, block: int, seed: int, backend: str = "inductor") -> Iterator[Measurement]:
    """Time steps of an annealed guide, in turn: uncompiled, with a compiled transition, with a compiled step, with both.

    :param length: length K of the chain.
    :param num_steps: number of steps of each contestant.
    :param block: steps of one contestant before the next takes over.
    :param seed: seed of the initial values and of the fit.
    :param backend: backend of :class:`~pyro_lvgp.infer.CompiledELBO`.
    """
    plain, everything = contestants(lambda: all_rows(length), seed=seed, backend=backend)
    transition, both = contestants(lambda: all_rows(length, compile=True), seed=seed, backend=backend)
    compiled = {"transition": transition, "all": everything, "both": both}
    seconds = take_turns([plain, *compiled.values()], num_steps=num_steps, block=block, seed=seed)
    values = {"step [ms]": 1e3 * seconds[0]}
    values |= {f"{what} compiled [ms]": 1e3 * median for what, median in zip(compiled, seconds[1:], strict=True)}
    values |= {f"compile {what} [s]": contestant.compile_seconds for what, contestant in compiled.items()}
    settings: Settings = {"steps": num_steps, "optimiser": f"fused Adam, rate {LEARNING_RATE:g}", "dtype": "float32"}
    for metric, value in values.items():
        yield Measurement("chains", f"K = {length}", metric, value, sum(plain.seconds), settings)


def take_turns(fits: Sequence[Contestant], *, num_steps: int, block: int, seed: int) -> list[float]:
    """Median step seconds of each contestant; blocks of steps alternate, and compilation caches start empty."""
    for contestant in fits:
        with fresh_inductor_cache():
            contestant.train(2, seed=seed)
    for done in range(0, num_steps, block):
        for contestant in fits:
            contestant.train(min(block, num_steps - done), seed=seed + done)
    return [statistics.median(contestant.seconds) for contestant in fits]


def contestants(
    make: Callable[[], Case], *, seed: int, backend: str, device: str | None = None
) -> tuple[Contestant, Contestant]:
    """Contestants of a case without and with a compiled bound, from the same initial values."""
    start = seeded(seed)(make)

    def compiled() -> Case:
        case = start()
        return case._replace(bound=CompiledELBO(case.bound, backend=backend))

    return Contestant(start, device=device), Contestant(compiled, device=device)


def gplvm(
    bound: LocalELBO, guide: Callable[[BayesianGPLVM], Any] = MeanFieldGuide, dtype: torch.dtype = torch.float64
) -> Case:
    """Bayesian GPLVM of oil flow."""
    Y = standardised().to(dtype)
    model = BayesianGPLVM(len(Y), Y.shape[1], 10, num_inducing=30).to(dtype).initialize(Y)
    return Case(model, guide(model), bound, (Y,), BATCH_SIZE, LEARNING_RATE)


def all_rows(num_steps: int, **options: Any) -> Case:
    """Bayesian GPLVM of oil flow with an annealed guide, on all rows at each step, in float32."""
    return gplvm(MeanFieldELBO(num_samples=1), annealed(num_steps, **options), torch.float32)._replace(batch_size=None)


def eeg() -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
    """Times from 0 to 1 and standardised electrodes, with gaps."""
    y, _, _ = gpvae_benchmark.eeg().data
    return torch.linspace(0.0, 1.0, len(y), dtype=y.dtype)[:, None], y


def three_rbfs() -> RBF:
    """Kernels of three latents over the times."""
    return RBF(1, lengthscale=torch.full((3, 1), 0.05, dtype=torch.float64), batch_shape=(3,))


def gpvae() -> Case:
    """GP-VAE of the EEG."""
    x, y = eeg()
    model = GPVAE(three_rbfs(), MLP(3, y.shape[1], (20,)), num_data=len(x)).double()
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(y.shape[1], 3)}).double()
    return Case(model, guide, StructuredELBO(), (x, y), 100, LEARNING_RATE)


def sparse_gpvae() -> Case:
    """Sparse GP-VAE of the EEG, projected sites, 30 inducing points."""
    x, y = eeg()
    Z = torch.linspace(0.0, 1.0, 30, dtype=torch.float64)[:, None]
    model = SparseGPVAE(three_rbfs(), MLP(3, y.shape[1], (20,)), Z).double()
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(y.shape[1], 3)}).double()
    return Case(model, guide, StructuredELBO(), (x, y), None, LEARNING_RATE)


def users_own() -> Case:
    """Poisson factorisation in plain Pyro, with a guide of any model."""
    N, D, Q = 500, 30, 5
    zeros, ones = torch.zeros(Q, dtype=torch.float64), torch.ones(D, dtype=torch.float64)

    def model(y, idx=None):
        W = pyro.sample("W", dist.Normal(zeros[:, None].expand(Q, D), 0.5).to_event(2))
        with pyro.plate("data", N, subsample=idx):
            x = pyro.sample("x", dist.Normal(zeros, 1.0).to_event(1))
            rate = (x.unsqueeze(-2) @ W).squeeze(-2).exp()
            pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    guide = MeanFieldGuide(model, create_plates=lambda y, idx=None: pyro.plate("data", N, subsample=idx))
    return Case(model, guide, MeanFieldELBO(), (torch.poisson(ones.expand(N, D)),), 100, LEARNING_RATE)


def annealed(num_steps: int, **options: Any) -> Callable[[BayesianGPLVM], AutoAnnealedLangevin]:
    """Annealed guides with the given number of transitions."""
    return lambda model: AutoAnnealedLangevin(model, num_steps=num_steps, **options)


CASES: dict[str, Callable[[], Case]] = {
    "Bayesian GPLVM, mean field": lambda: gplvm(MeanFieldELBO()),
    "Bayesian GPLVM, IW, S = 5": lambda: gplvm(ImportanceWeightedELBO(num_samples=5)),
    "Bayesian GPLVM, annealed, K = 5": lambda: gplvm(MeanFieldELBO(num_samples=1), annealed(5)),
    "Bayesian GPLVM, annealed, K = 10": lambda: gplvm(MeanFieldELBO(num_samples=1), annealed(10)),
    "GP-VAE": gpvae,
    "GP-VAE, sparse": sparse_gpvae,
    "a user's own, mean field": users_own,
}
TASKS: dict[str, tuple[Callable[..., Iterator[Measurement]], Collection[Any]]] = {
    "steps": (measure, CASES),
    "chains": (measure_chain, (5, 10, 20)),
}
