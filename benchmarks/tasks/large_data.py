"""Time of a step on mini-batches against the number of rows of the data, by Adam of all rows and of the batch alone."""

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated, median_step
from benchmarks.core.report import Measurement, Row
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LazyAdam, MeanFieldELBO
from pyro_lvgp.infer._svi import CheckedSVI
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS, NUM_SEEDS = 1, 1
NUM_STEPS, NUM_UNTIMED = 60, 5
SIZES, QUICK_SIZES = (1000, 10_000, 100_000, 1_000_000), (300, 1000)
BATCH_SIZE, D, Q, M = 200, 12, 10, 25
PUBLISHED: list[Row] = []
NOTES = f"""\
Bayesian GPLVM of generated data with {D} columns, {Q} latent dimensions and {M} inducing points, in float32. A step draws
{BATCH_SIZE} rows. "step" is the median time of {NUM_STEPS} steps through Pyro, and "/ fewest rows" its ratio to the step of
the same method on the fewest rows. `JointAdam` has gradients and moments of all rows, `LazyAdam` those of the mini-batch."""

GUIDES: dict[str, Callable[[BayesianGPLVM], Any]] = {
    "mean field": MeanFieldGuide,
    "annealed, K = 5": lambda model: AutoAnnealedLangevin(model, num_steps=5),
}
OPTIMIZERS = {"JointAdam": JointAdam, "LazyAdam": LazyAdam}


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Time all guides and optimisers on data of all sizes."""
    sizes, num_steps = (QUICK_SIZES, 3) if quick else (SIZES, NUM_STEPS)
    first: dict[tuple[str, str, int], float] = {}
    for seed, (guide, optim), size in tqdm(list(product(range(seeds), product(GUIDES, OPTIMIZERS), sizes)), unit="fit"):
        start = time.perf_counter()
        step = time_step(guide, optim, data(size, seed), seed=seed, num_steps=num_steps)
        seconds = time.perf_counter() - start
        ratio = step / first.setdefault((guide, optim, seed), step)
        for metric, value in (("step [ms]", 1e3 * step), ("/ fewest rows", ratio)):
            yield Measurement(f"{size} rows", f"{guide}, {optim}", metric, value, seconds, {"steps": num_steps})


def data(size: int, seed: int) -> Float[Tensor, "N D"]:
    """Noisy sines of two latents."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(size, 2, generator=generator)
    Y = torch.sin(2.0 * X @ torch.randn(2, D, generator=generator)) + 0.1 * torch.randn(size, D, generator=generator)
    return (Y - Y.mean(0)) / Y.std(0)


def time_step(guide: str, optim: str, Y: Float[Tensor, "N D"], *, seed: int, num_steps: int) -> float:
    """Return the median number of seconds of a step on a mini-batch."""
    with isolated(seed):
        model = BayesianGPLVM(len(Y), D, Q, num_inducing=M).initialize(Y)
        svi = CheckedSVI(model, GUIDES[guide](model), OPTIMIZERS[optim](), MeanFieldELBO(max_plate_nesting=1))
        chosen = (torch.randint(len(Y), (BATCH_SIZE,)).unique() for _ in range(NUM_UNTIMED + num_steps))
        return median_step(svi, ((Y[idx], idx) for idx in chosen), NUM_UNTIMED)
