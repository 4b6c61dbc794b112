"""Seconds of a step of the random-feature LVM and of a sweep of its Gibbs sampler, by number of rows and columns."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers import gibbs_rflvm
from pyro_lvgp.datasets import s_curve
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI
from pyro_lvgp.models import RandomFeatureLVM

NUM_THREADS = 1
Sizes = list[tuple[int, int]]
TASKS: dict[str, Sizes] = {
    "rows": [(number, 50) for number in (500, 1000, 2000, 4000)],
    "columns": [(500, number) for number in (100, 400, 1600, 6400)],
}
QUICK_SIZES: dict[str, Sizes] = {"rows": [(40, 5), (80, 5)], "columns": [(40, 5), (40, 10)]}
LATENT_DIM, NUM_FREQUENCIES, NUM_COMPONENTS, NUM_REPEATS = 2, 50, 20, 5
SLOPE = "slope"
PUBLISHED: list[Row] = []
NOTES = """\
Data from an S-shaped curve (`s_curve`). Times are processor seconds of one step of our fit, which updates all parameters once,
and of one sweep of the sampler, which draws all variables once: the minimum of five, after one to warm up. A fit has some 500
steps; a chain needs hundreds of sweeps or more. The slope is that of log seconds over log size, by least squares."""


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Time the step and the sweep by number of rows and of columns, or by one of them; if quick, at small sizes."""
    settings: Settings = {"Q": LATENT_DIM, "frequencies": NUM_FREQUENCIES, "components": NUM_COMPONENTS}
    for part in [only] if only else list(TASKS):
        sizes = (QUICK_SIZES if quick else TASKS)[part]
        which = 0 if part == "rows" else 1
        for seed in tqdm(range(seeds), desc=part, unit="seed"):
            for name, make in METHODS.items():
                start = time.perf_counter()
                times = {size[which]: _seconds(make, *size, seed=seed) for size in sizes}
                values = {f"{'ND'[which]} = {size} [s]": value for size, value in times.items()} | {SLOPE: slope(times)}
                dataset = f"s_curve, {'D' if which == 0 else 'N'} = {sizes[0][1 - which]}"
                seconds = time.perf_counter() - start
                for metric, value in values.items():
                    yield Measurement(dataset, name, metric, value, seconds, settings)


def slope(times: dict[int, float]) -> float:
    """Exponent p of seconds ∝ sizeᵖ."""
    return float(np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0])


def our_step(N: int, D: int, *, seed: int) -> Callable[[], object]:
    """Seconds of a training step of our model."""
    Y = torch.as_tensor(s_curve(N, D, seed=seed).Y, dtype=torch.float32)
    model = RandomFeatureLVM(N, D, LATENT_DIM, num_frequencies=NUM_FREQUENCIES, num_components=NUM_COMPONENTS)
    guide = RandomFeatureGuide(model.initialize(Y), frequencies="gaussian", seed=seed)
    vi = BlockCoordinateVI(model, guide, guide.blocks())
    return lambda: vi.step(Y)


def gibbs_sweep(N: int, D: int, *, seed: int) -> Callable[[], object]:
    """Seconds of a sweep of the Gibbs sampler."""
    Y = torch.as_tensor(s_curve(N, D, seed=seed).Y)
    centred, sampler = Y - Y.mean(0), gibbs_rflvm.GibbsRFLVM()
    state = gibbs_rflvm.start(sampler, centred, LATENT_DIM, F=NUM_FREQUENCIES, C=NUM_COMPONENTS)
    return lambda: sampler.sweep(state, centred[None])


def _seconds(make: Callable[..., Callable[[], object]], N: int, D: int, *, seed: int) -> float:
    """Minimum processor seconds of a call."""
    with isolated(seed):
        call, times = make(N, D, seed=seed), []
        for _ in range(NUM_REPEATS + 1):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    return min(times[1:])


METHODS = {"RandomFeatureLVM, a step": our_step, "Gibbs, a sweep": gibbs_sweep}
