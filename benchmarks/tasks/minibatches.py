"""Mini-batches of the points of one series under a sparse GP-VAE: quality of the bound and of the fit."""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import SparseGPVAE, cluster_centres
from pyro_lvgp.networks import MLP, IndexNet

NUM_THREADS = 1
NUM_POINTS, NUM_STEPS, NUM_BATCHES = 1000, 1000, 40
NOISE = 0.3
PUBLISHED: list[Row] = []
NOTES = f"""\
Data are four sines over time, one after the other, at {NUM_POINTS} times with noise of variance {NOISE**2:.2f}. The model has
two latent processes with RBF kernels and 20 inducing points, and is fitted in {NUM_STEPS} steps. "on batches" is minus the
bound that the fit maximises, the mean over {NUM_BATCHES} mini-batches after the fit. "on all" is minus the bound of the same
model and guide on all points. If the first is below the second, the bound on mini-batches is too optimistic. RMSE is that of
the predicted sines."""

WAYS = {"all encoded, all scored": 0.0, "half held out": 0.5, "free q(u)": None}


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Train in each way on batches of each size, and on all points."""
    ways: list[tuple[str, float | None, int | None]] = [
        (f"{name}, {size} points", held_out, size) for size, (name, held_out) in itertools.product((50, 200), WAYS.items())
    ]
    ways.append(("all points", 0.0, None))
    for (name, held_out, size), seed in tqdm(list(itertools.product(ways, range(seeds))), desc="wave", unit="fit"):
        settings: Settings = {"steps": 20 if quick else NUM_STEPS}
        for metric, value, seconds in train(held_out, size, seed=seed, num_steps=int(settings["steps"])):
            yield Measurement("wave", name, metric, value, seconds, settings)


def train(held_out: float | None, size: int | None, *, seed: int, num_steps: int) -> Iterator[tuple[str, float, float]]:
    """Fit once; return metric, value and seconds of the fit.

    :param held_out: share of a mini-batch that is not encoded; None for a q(u) without an encoder.
    :param size: number of points of a mini-batch; None for all of them.
    """
    with isolated(seed):
        t = torch.linspace(0.0, 1.0, NUM_POINTS, dtype=torch.float64)[:, None]
        wave = torch.sin(2.0 * math.pi * (2.0 * t + torch.arange(4) / 8.0))
        y = wave + NOISE * torch.randn_like(wave)
        kernel, Z = RBF(1, lengthscale=0.1, batch_shape=(2,)), cluster_centres(t, 20, seed=seed)
        model = SparseGPVAE(kernel, MLP(2, 4, (20,)), Z, num_data=NUM_POINTS, held_out=held_out or 0.0).double()
        guide = SparseStructuredGPGuide(model, encoders={"u": None if held_out is None else IndexNet(4, 2).double()})
        bound = MeanFieldELBO("points", max_plate_nesting=1)
        start = time.perf_counter()
        how: dict[str, Any] = {"num_steps": num_steps, "batch_size": size, "seed": seed, "progress": False}
        fit(model, guide, t, y, loss=bound, **how)
        seconds = time.perf_counter() - start
        precise = MeanFieldELBO("points", 20, max_plate_nesting=1)
        if size is not None:
            batches = [torch.randperm(NUM_POINTS)[:size] for _ in range(NUM_BATCHES)]
            losses = [precise.loss(model, guide, t[idx], y[idx], idx) for idx in batches]
            yield "on batches [nats]", sum(losses) / NUM_BATCHES, seconds
        yield "on all [nats]", precise.loss(model, guide, t, y), seconds
        yield "noise variance", model.likelihood.variance.item(), seconds
        yield "RMSE", (model.predict(guide, t, y).mean - wave).square().mean().sqrt().item(), seconds
