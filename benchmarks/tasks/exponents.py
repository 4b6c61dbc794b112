"""Time of a step of a Bayesian GPLVM against each of its sizes, with the exponent of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from tqdm import tqdm

from benchmarks.core.isolated import isolated, median_step
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import LazyAdam, MeanFieldELBO
from pyro_lvgp.infer._svi import CheckedSVI
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS, NUM_SEEDS = 1, 1
NUM_STEPS, NUM_UNTIMED, NUM_FITTED = 20, 5, 3
BASE = {"N": 10_000, "B": 500, "D": 20, "Q": 5, "M": 50, "K": 0}
GRID = {
    "N": (1000, 10_000, 100_000, 1_000_000),
    "B": (100, 400, 1600, 6400),
    "D": (20, 80, 320, 1280),
    "Q": (2, 8, 32, 128),
    "M": (25, 100, 400, 1600),
    "K": (2, 8, 32, 128),
}
OPERATIONS = {"N": 0, "B": 1, "D": 1, "Q": 1, "M": 3, "K": 1}
TASKS = tuple(GRID)
PUBLISHED: list[Row] = []
NOTES = f"""\
Median time of {NUM_STEPS} steps through Pyro, float32, with one of the sizes changed and the others at N = {BASE["N"]} rows,
mini-batches of B = {BASE["B"]}, D = {BASE["D"]} columns, Q = {BASE["Q"]} latents, M = {BASE["M"]} inducing points; mean
field, or annealed with K transitions; `LazyAdam`. "exponent" is the slope of log seconds over log size of the {NUM_FITTED}
largest sizes, and "operations" that of the number of operations for large sizes. The exponent is smaller where the fixed
cost of calling operations is most of the time."""


def run(*, quick: bool, seeds: int, only: str | None = None, picture: Path | None = None) -> Iterator[Measurement]:
    """Time steps for each size, or one."""
    for seed in range(seeds):
        seconds: dict[str, dict[int, float]] = {}
        for name in tqdm([only] if only else TASKS, unit="size"):
            sizes = GRID[name][:2] if quick else GRID[name]
            num_steps = 2 if quick else NUM_STEPS
            seconds[name] = {size: time_step(BASE | {name: size}, seed=seed, num_steps=num_steps) for size in sizes}
            settings: Settings = {"sizes": ", ".join(map(str, sizes)), "operations": OPERATIONS[name]}
            for size, value in seconds[name].items():
                yield Measurement("step [ms]", name, f"size {sizes.index(size) + 1}", 1e3 * value, value, settings)
            yield Measurement("step [ms]", name, "exponent", exponent(seconds[name]), 0.0, settings)
        if picture is not None and seed == 0:
            draw(seconds).savefig(picture, dpi=110)


def time_step(sizes: dict[str, int], *, seed: int, num_steps: int) -> float:
    """Return the median number of seconds of a step on a mini-batch of random rows."""
    N, B, D, Q, M, K = sizes.values()
    with isolated(seed):
        model = BayesianGPLVM(N, D, Q, num_inducing=M)
        guide: Any = AutoAnnealedLangevin(model, num_steps=K) if K else MeanFieldGuide(model)
        svi = CheckedSVI(model, guide, LazyAdam(), MeanFieldELBO(num_samples=1, max_plate_nesting=1))
        batches = ((torch.randn(B, D), torch.randperm(N)[:B]) for _ in range(NUM_UNTIMED + num_steps))
        return median_step(svi, batches, NUM_UNTIMED)


def exponent(seconds: dict[int, float]) -> float:
    """Slope of log seconds over log size, by least squares, of the largest sizes.

    >>> round(exponent({1: 5.0, 10: 1.0, 100: 100.0, 1000: 10_000.0}), 6)
    2.0
    """
    sizes, values = (np.log(list(each)[-NUM_FITTED:]) for each in (seconds, seconds.values()))
    return float(np.polyfit(sizes, values, 1)[0])


def draw(seconds: dict[str, dict[int, float]]) -> Any:
    """Plot the time of a step against each size, with the slope of the number of operations."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(
        1, len(seconds), figsize=(2.2 * len(seconds), 2.6), sharey=True, layout="constrained", squeeze=False
    )
    for ax, (name, values) in zip(axes[0], seconds.items(), strict=True):
        sizes, milliseconds = np.array(list(values), float), 1e3 * np.array(list(values.values()))
        ax.loglog(sizes, milliseconds, "o-", label="measured")
        slope = milliseconds[-1] * (sizes / sizes[-1]) ** OPERATIONS[name]
        ax.loglog(sizes, np.maximum(slope, 1.0), "--", label="operations")
        ax.set(title=f"exponent {exponent(values):.2f}", xlabel=name)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("step [ms]")
    axes[0, 0].legend(frameon=False)
    return figure
