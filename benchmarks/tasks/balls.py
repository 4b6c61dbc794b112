"""GP-VAE on bouncing balls: forecasts beside a linear dynamical system, and two balls with hidden pixels."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.linear_dynamics import LinearDynamics
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.datasets import bouncing_balls
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import Periodic
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, IndexNet, ZeroImputation

NUM_THREADS = 1
NUM_TRAINED, NUM_TESTED, NUM_TIMES = 80, 10, 50
AHEAD, NUM_STATES = (1, 2, 5, 10, 20), 8
PUBLISHED: list[Row] = []
NOTES = """\
Models predict from the posteriors of their encoders, as in the thesis, without updates of sites.

Training data are 80 sequences of 50 images, test data 10 other sequences. The MAE at τ steps is the mean absolute error of the
noiseless pixels τ steps after each prefix (eq. 5.7 of the thesis). One ball: 12 pixels, one latent process with a periodic
kernel, networks with two layers of 50, as in the thesis, which shows its errors as curves only. Two balls, one of which falls:
50 pixels of which half are missing, a latent process with a periodic kernel for each ball, IndexNet with networks of 32.
Periods are initialised at 1.1 times the true ones. "rank correlation" is that of the position of a ball with the latent
process of highest correlation, over all test sequences, since latent processes are monotone functions of positions, of either
sign. "other" is that with the other latent process. The linear dynamical system has eight states and observes all pixels. Its
likelihood is maximised by Adam, from principal components."""


@dataclass(frozen=True)
class Task:
    """Sequences, their noiseless images, and settings of the fit.

    :param Y: images [sequence, time, pixel], NaN where missing.
    :param F: images without noise.
    :param places: positions of the balls [ball, sequence, time].
    :param periods: periods of the balls.
    """

    Y: Float[Tensor, "S T D"]
    F: Float[Tensor, "S T D"]
    places: Float[Tensor, "balls S T"]
    periods: tuple[float, ...]
    hidden: int
    num_steps: int = 3000

    @property
    def t(self) -> Float[Tensor, "T 1"]:
        return torch.arange(float(self.Y.shape[1]), dtype=self.Y.dtype)[:, None]


def one(seed: int) -> Task:
    """Task of a ball at constant speed."""
    data = bouncing_balls(NUM_TRAINED + NUM_TESTED, NUM_TIMES, seed=seed)
    Y, F, places = (torch.as_tensor(data[name]) for name in ("Y", "F", "position"))
    return Task(Y, F, places[None], (16.0,), hidden=50)


def two(seed: int) -> Task:
    """Task of a ball at constant speed and one that falls, with half of the pixels missing."""
    size: dict[str, Any] = {"num_sequences": NUM_TRAINED + NUM_TESTED, "num_steps": NUM_TIMES, "num_pixels": 50, "width": 2.0}
    periods = (17.0, 11.0)
    balls = [
        bouncing_balls(**size, period=period, gravity=gravity, seed=100 * seed + i)
        for i, (period, gravity) in enumerate(zip(periods, (False, True), strict=True))
    ]
    first, second = (torch.as_tensor(ball["F"]) for ball in balls)
    F = torch.maximum(first, second)
    generator = torch.Generator().manual_seed(seed)
    Y = F + 0.1 * torch.randn(F.shape, generator=generator, dtype=F.dtype)
    Y = Y.masked_fill(torch.rand(F.shape, generator=generator) < 0.5, torch.nan)
    return Task(Y, F, torch.stack([torch.as_tensor(ball["position"]) for ball in balls]), periods, hidden=128)


TASKS = {"one": one, "two": two}


class Fitted(NamedTuple):
    """Model and guide after a fit."""

    model: GPVAE
    guide: StructuredGPGuide
    seconds: float


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure both tasks, or one, for each seed."""
    for name in [only] if only else list(TASKS):
        for seed in tqdm(range(seeds), desc=name, unit="seed"):
            yield from measure(name, seed, num_steps=20 if quick else None)


def measure(name: str, seed: int, *, num_steps: int | None = None) -> Iterator[Measurement]:
    """Fit one model; measure forecast errors and the correlation of latents with positions."""
    task = TASKS[name](seed)
    dataset = f"balls, {name}"
    settings: Settings = {"steps": num_steps or task.num_steps}
    with pyro.get_param_store().scope():
        fitted = train(task, seed=seed, num_steps=num_steps)
        values = {f"MAE, τ = {tau}": error for tau, error in errors_ahead(task, fitted, AHEAD).items()}
        values |= correlations(task, fitted)
    for metric, value in values.items():
        yield Measurement(dataset, "GP-VAE", metric, value, fitted.seconds, settings)
    if not torch.isnan(task.Y).any():
        start = time.perf_counter()
        peer = fit_peer(task, num_steps)
        seconds = time.perf_counter() - start
        for tau, error in peer_errors(task, peer, AHEAD).items():
            yield Measurement(dataset, "linear dynamical system", f"MAE, τ = {tau}", error, seconds, {"states": NUM_STATES})


def train(task: Task, *, seed: int, num_steps: int | None = None, progress: bool = False) -> Fitted:
    """Fit to the training sequences, by mini-batches of ten."""
    D, Q = task.Y.shape[-1], len(task.periods)
    with seeded(seed):
        kernel = Periodic(1, period=1.0, batch_shape=(Q,))
        kernel.period = 1.1 * torch.tensor(task.periods)[:, None]
        decoder = MLP(Q, D, (task.hidden, task.hidden), nn.Tanh)
        model = GPVAE(kernel, decoder, Gaussian(0.1), num_data=NUM_TRAINED).double()
        whole = not torch.isnan(task.Y).any()
        encoder = ZeroImputation(D, Q, (50, 50)) if whole else IndexNet(D, Q, (32,), feature_dim=32)
        guide = StructuredGPGuide(model, encoders={"f": encoder.double()}, num_eval_site_updates=0)
        history = fit(
            model,
            guide,
            task.t.expand(NUM_TRAINED, -1, -1),
            task.Y[:NUM_TRAINED],
            loss=StructuredELBO(max_plate_nesting=2),
            num_steps=num_steps or task.num_steps,
            batch_size=10,
            optim=JointAdam(lr=3e-3),
            callbacks=[LRSchedule("cosine")],
            seed=seed,
            progress=progress,
        )
    return Fitted(model, guide, history.seconds[-1])


def foresee(task: Task, fitted: Fitted) -> Float[Tensor, "prefix S T D"]:
    """Predictive means of all images of the test sequences, given prefixes of 1 to T − 1 images."""
    Y = task.Y[NUM_TRAINED:]
    T = Y.shape[1]
    shown = torch.ones(T, T, dtype=torch.bool).tril()[:-1]
    return torch.stack(
        [
            fitted.model.predict(fitted.guide, task.t, Y.masked_fill(~row[:, None], torch.nan), num_samples=20).mean
            for row in shown
        ]
    )


def errors_ahead(task: Task, fitted: Fitted, ahead: Sequence[int]) -> dict[int, float]:
    """Mean absolute errors τ steps after every prefix."""
    means, truth = foresee(task, fitted), task.F[NUM_TRAINED:]
    T = truth.shape[1]
    return {
        tau: float(np.mean([(means[n, :, n + tau] - truth[:, n + tau]).abs().mean().item() for n in range(T - tau)]))
        for tau in ahead
    }


def fit_peer(task: Task, num_steps: int | None = None) -> LinearDynamics:
    """Fit a linear dynamical system to the training sequences."""
    Y = task.Y[:NUM_TRAINED]
    return LinearDynamics(Y, NUM_STATES).double().fit(Y, num_steps or 1000)


def peer_errors(task: Task, peer: LinearDynamics, ahead: Sequence[int]) -> dict[int, float]:
    """Mean absolute errors τ steps after every prefix, of a linear dynamical system."""
    Y, truth = task.Y[NUM_TRAINED:], task.F[NUM_TRAINED:]
    T = truth.shape[1]
    found: dict[int, list[float]] = {tau: [] for tau in ahead}
    for n in range(1, T):
        foreseen = peer.forecast(Y[:, :n], max(ahead))
        for tau in ahead:
            if n - 1 + tau < T:
                found[tau].append((foreseen[:, tau - 1] - truth[:, n - 1 + tau]).abs().mean().item())
    return {tau: float(np.mean(errors)) for tau, errors in found.items()}


@torch.no_grad()
def correlations(task: Task, fitted: Fitted) -> dict[str, float]:
    """Rank correlations of each ball's place with the latents, given all images."""
    f = fitted.guide.median(task.t.expand(NUM_TESTED, -1, -1), task.Y[NUM_TRAINED:])["f"].squeeze(-3)  # [S, Q, T]
    latents, places = f.transpose(0, 1).flatten(1), task.places[:, NUM_TRAINED:].flatten(1)
    ranks = torch.cat([latents, places]).argsort(-1).argsort(-1).double()
    table = ranks.corrcoef()[len(latents) :, : len(latents)].abs()  # [ball, latent]
    found = {f"rank correlation, ball {b}": row.max().item() for b, row in enumerate(table)}
    if len(table) > 1:
        found |= {f"other rank correlation, ball {b}": row.min().item() for b, row in enumerate(table)}
    return found
