"""Soak: fits, predictions and files of all models, again and again in one process, with its memory and its speed."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from matplotlib import pyplot as plt
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.memory import resident_megabytes
from benchmarks.core.report import Measurement, Row
from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import Checkpoint, MeanFieldELBO, StructuredELBO, fit, load, save
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Bernoulli, StudentT
from pyro_lvgp.models import GPVAE, BayesianGPLVM, LinearGPVAE, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from pyro_lvgp.sklearn import GPLVM

NUM_THREADS, NUM_SEEDS = 1, 1
NUM_STEPS, NUM_PARTS = 20, 10
PUBLISHED: list[Row] = []
NOTES = f"""\
One process fits every model for {NUM_STEPS} steps, with a checkpoint, predicts, saves, loads, and checks that the loaded model
predicts the same; then it starts again. One round of all models, which imports modules, precedes the recording.
"memory" is the resident set size after a round, "steps per CPU second" are those of the fits of a round. The columns are means
of the first and the last tenth of the time, their ratio, and the slope of a line through the means of the ten tenths with
its standard error. CPU seconds change less than seconds with other work on the machine. Compiled bounds are left out: torch
keeps some 1 MB of every graph that it has compiled, here as in a program of torch alone."""

N, D = 60, 5


class Round(NamedTuple):
    """State after one fit of every model.

    :param hours: since the start of the recording.
    :param memory: resident set size in MB.
    :param speed: steps of the fits per second of CPU time.
    """

    hours: float
    memory: float
    speed: float


def run(*, quick: bool, seeds: int, minutes: float | None = None, picture: Path | None = None) -> Iterator[Measurement]:
    """Record rounds for the given time, and compare the first tenth with the last.

    :param minutes: duration of the recording of each seed; 60 by default, and 0.2 if ``quick``.
    :param picture: file for a plot of the last recording.
    """
    minutes = (0.2 if quick else 60.0) if minutes is None else minutes
    for seed in range(seeds):
        start = time.perf_counter()
        rounds = record(minutes, seed=seed)
        seconds = time.perf_counter() - start
        settings: dict[str, str | int | float] = {"minutes": minutes, "rounds": len(rounds), "steps": NUM_STEPS}
        for name, values in (("memory [MB]", [r.memory for r in rounds]), ("steps per CPU second", [r.speed for r in rounds])):
            for metric, value in summarise([r.hours for r in rounds], values).items():
                yield Measurement("soak", name, metric, value, seconds, settings)
        if picture is not None:
            draw(rounds).savefig(picture, dpi=110)


def record(minutes: float, *, seed: int) -> list[Round]:
    """Fit all models until the time is up, and at least as many times as there are tenths."""
    rounds: list[Round] = []
    logging.getLogger("pyro").setLevel(logging.ERROR)  # bounds tell the number of plates that they found
    with tempfile.TemporaryDirectory() as folder, tqdm(total=minutes, desc="soak", unit="min", leave=False) as bar:
        one_round(seed, Path(folder))
        start = time.perf_counter()
        while time.perf_counter() - start < 60.0 * minutes or len(rounds) < NUM_PARTS:
            speed = one_round(seed + 1 + len(rounds), Path(folder))
            elapsed = time.perf_counter() - start
            rounds.append(Round(elapsed / 3600.0, resident_megabytes(), speed))
            bar.update(min(elapsed / 60.0, minutes) - bar.n)
    return rounds


def one_round(seed: int, folder: Path) -> float:
    """Use every model once, and return the steps per CPU second of the fits."""
    steps, seconds = 0, 0.0
    for work in WORK.values():
        with isolated(seed):
            taken, spent = work(seed, folder)
        steps, seconds = steps + taken, seconds + spent
    return steps / seconds


def summarise(hours: list[float], values: list[float]) -> dict[str, float]:
    """Compare tenths of a recording; the slope is that of least squares through their means.

    >>> summarise([0.1 * i for i in range(20)], [5.0 + 0.2 * i for i in range(20)])["slope [1/h]"]
    2.0
    """
    x, y = (np.array([part.mean() for part in np.array_split(np.array(each), NUM_PARTS)]) for each in (hours, values))
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    residuals = y - y.mean() - slope * x
    error = float(np.sqrt(residuals @ residuals / (NUM_PARTS - 2) / (x @ x)))
    summary = {"first tenth": y[0], "last tenth": y[-1], "ratio": y[-1] / y[0], "slope [1/h]": slope, "standard error": error}
    return {name: round(float(value), 9) for name, value in summary.items()}


def draw(rounds: list[Round]) -> Any:
    """Plot memory and speed over time."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(2, 1, figsize=(7.0, 4.6), sharex=True, layout="constrained")
    minutes = 60.0 * np.array([r.hours for r in rounds])
    for ax, name, values in zip(
        axes, ("memory [MB]", "steps per CPU second"), ([r.memory for r in rounds], [r.speed for r in rounds]), strict=True
    ):
        parts = [np.array_split(np.array(each), NUM_PARTS) for each in (minutes, values)]
        means = [[part.mean() for part in each] for each in parts]
        ax.plot(minutes, values, ".", markersize=2, alpha=0.4, label="after a round")
        ax.plot(*means, "o-", label="means of tenths")
        ax.set(ylabel=name, ylim=(0.0, 1.15 * max(values)))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower right", frameon=False)
    axes[1].set_xlabel("minutes")
    return figure


def data(seed: int) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
    """Inputs and noisy sines, with missing entries."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0.0, 1.0, N)[:, None]
    Y = torch.sin(6.0 * x + torch.arange(D)) + 0.1 * torch.randn(N, D, generator=generator)
    return x, torch.where(torch.rand(N, D, generator=generator) < 0.1, torch.nan, Y)


def use(model: Any, guide: Any, arguments: tuple[Tensor, ...], folder: Path, **options: Any) -> tuple[int, float]:
    """Fit in two parts with a checkpoint, predict, export, save and load; return steps and CPU seconds of the fits."""
    options |= {"seed": 0, "progress": False, "callbacks": [Checkpoint(folder / "fit.pt")]}
    start = time.process_time()
    for num_steps in (NUM_STEPS // 2, NUM_STEPS):
        fit(model, guide, *arguments, num_steps=num_steps, **options)
    seconds = time.process_time() - start
    (folder / "fit.pt").unlink()
    to_arviz(model, guide, *arguments, num_samples=5, seed=0)
    save(folder / "model.safetensors", model, guide)
    loaded = load(folder / "model.safetensors")
    pairs = ((model, guide), (loaded.model, loaded.guide))
    means = [one.impute(its_guide, *arguments, num_samples=5, seed=0).mean for one, its_guide in pairs]
    if not torch.equal(*means):
        raise RuntimeError(f"expected the loaded {type(model).__name__} to predict the same, got other means")
    return NUM_STEPS, seconds


def gplvm(seed: int, folder: Path) -> tuple[int, float]:
    """Bayesian GPLVM with heavy tails."""
    _, Y = data(seed)
    model = BayesianGPLVM(N, D, 2, num_inducing=8, likelihood=StudentT()).initialize(Y)
    return use(model, MeanFieldGuide(model), (Y,), folder, loss=MeanFieldELBO(), batch_size=20)


def annealed_gplvm(seed: int, folder: Path) -> tuple[int, float]:
    """Bayesian GPLVM with an annealed guide."""
    _, Y = data(seed)
    model = BayesianGPLVM(N, D, 2, num_inducing=8).initialize(Y)
    return use(model, AutoAnnealedLangevin(model, num_steps=2), (Y,), folder)


def random_features(seed: int, folder: Path) -> tuple[int, float]:
    """Random features with binary data."""
    _, Y = data(seed)
    Y = torch.where(torch.isnan(Y), Y, (Y > 0.0).to(Y))
    model = RandomFeatureLVM(N, D, 2, num_frequencies=8, num_components=2, likelihood=Bernoulli()).initialize(Y)
    guide = RandomFeatureGuide(model)
    return use(model, guide, (Y,), folder, optim=guide.blocks())


def gp_vae(seed: int, folder: Path) -> tuple[int, float]:
    """GP-VAE with a nonlinear decoder."""
    model = GPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2, D, [8]))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 2)})
    return use(model, guide, data(seed), folder, loss=StructuredELBO())


def sparse_gp_vae(seed: int, folder: Path) -> tuple[int, float]:
    """Sparse GP-VAE with a linear decoder."""
    x, Y = data(seed)
    model = SparseGPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), torch.nn.Linear(2, D), x[::6].clone())
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2)})
    return use(model, guide, (x, Y), folder, loss=MeanFieldELBO())


def linear_gp_vae(seed: int, folder: Path) -> tuple[int, float]:
    """Linear GP-VAE by coordinate ascent."""
    x, Y = (each.double() for each in data(seed))
    model = LinearGPVAE(None, independent_dim=2)
    start = time.process_time()
    bounds = model.fit(x, Y, num_sweeps=5)
    seconds = time.process_time() - start
    model.predict(num_samples=5, seed=0).quantile(0.5)
    return len(bounds), seconds


def estimator(seed: int, folder: Path) -> tuple[int, float]:
    """Estimator with the interface of scikit-learn."""
    Y = data(seed)[1].numpy()
    start = time.process_time()
    fitted = GPLVM(max_iter=NUM_STEPS, n_inducing=8, random_state=0).fit(Y)
    seconds = time.process_time() - start
    fitted.inverse_transform(fitted.transform(Y[:5]))
    return NUM_STEPS, seconds


WORK: dict[str, Callable[[int, Path], tuple[int, float]]] = {
    "BayesianGPLVM": gplvm,
    "BayesianGPLVM, annealed": annealed_gplvm,
    "RandomFeatureLVM": random_features,
    "GPVAE": gp_vae,
    "SparseGPVAE": sparse_gp_vae,
    "LinearGPVAE": linear_gp_vae,
    "GPLVM (scikit-learn)": estimator,
}
