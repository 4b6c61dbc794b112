"""GPVAERegressor on EEG trials, motion capture and air quality, beside ridge regression, neighbours and interpolation."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Normal
from tqdm import tqdm

from benchmarks.core.arrays import load_arrays
from benchmarks.core.report import Measurement, Row
from benchmarks.peers import imputers
from benchmarks.peers.imputers import Filled
from pyro_lvgp.sklearn import GPVAERegressor

NUM_THREADS = 1
PUBLISHED: list[Row] = []
OURS = "GPVAERegressor"
NOTES = """\
The estimator has its defaults, as at the top of docs/gp_vae.md, with period=24 for hourly data. It has no seeds; spreads are
those over trials. "eeg_trials": ten trials of other subjects and conditions than that of the benchmark "gpvae"; the last 100
of 256 samples of FZ, F1 and F2 are hidden. "motion": joint angles of walking and running, every second frame of the first
eight training sequences and of the first test sequence, of which the right leg, the upper body or six whole frames (twelve of
the recording) are hidden; at the whole rate every frame, of which six are hidden. Sequences are far apart in time. "air": 1500
hours from hour 5500, logarithms of positive columns; the analysers are hidden on every fifth day, or all columns for the last
12 hours of every fifth day.

SMSE is the mean squared error of a column divided by the variance of its hidden entries, averaged over columns. RMSE is over
all hidden entries in the units of the data (degrees for joints). NLL is minus the mean log density of a hidden entry; coverage
is the share of hidden entries within 1.645 predictive standard deviations, 0.9 if the prediction is calibrated."""


@dataclass(frozen=True)
class Recording:
    """Table over time with hidden entries.

    :param t: times.
    :param Y: values, NaN where unknown.
    :param hidden: mask of the entries to predict.
    :param peers: names of the methods to compare with.
    :param period: cycle that is passed to the estimator.
    """

    t: Float[Tensor, " N"]
    Y: Float[Tensor, "N D"]
    hidden: Bool[Tensor, "N D"]
    peers: tuple[str, ...]
    period: float | None = None

    def scores(self, mean: Tensor, stddev: Tensor | None, log_prob: Tensor | None) -> Iterator[tuple[str, float]]:
        """Errors, and NLL and coverage of predictions with standard deviations."""
        hidden = self.hidden & ~self.Y.isnan()
        columns = [(mean[rows, d], self.Y[rows, d]) for d, rows in enumerate(hidden.T) if rows.any()]
        columns = [(a, b) for a, b in columns if b.std() > 1e-6]
        yield "RMSE", (mean - self.Y)[hidden].square().mean().sqrt().item()
        yield "SMSE", float(np.mean([((a - b).square().mean() / b.var(correction=0)).item() for a, b in columns]))
        if stddev is not None:
            density = Normal(mean.nan_to_num(), stddev).log_prob(self.Y.nan_to_num()) if log_prob is None else log_prob
            yield "NLL", -density[hidden].mean().item()
            yield "coverage", ((mean - self.Y).abs() < 1.645 * stddev)[hidden].double().mean().item()


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Filled]] = {
    "Bayesian ridge": imputers.ridge,
    "5 nearest neighbours": imputers.neighbours,
    "linear interpolation": imputers.linear_interpolation,
    "cubic spline": imputers.spline,
    "independent GPs, Matérn-½ and daily": imputers.daily_processes,
}


def eeg_trials() -> Iterator[tuple[str, Recording]]:
    """Ten trials with three electrodes hidden at the end."""
    data = load_arrays("eeg_trials")
    hidden = torch.zeros(data["Y"].shape[1:], dtype=torch.bool)
    hidden[-100:, :3] = True
    for Y in data["Y"]:
        yield (
            "eeg_trials",
            Recording(torch.as_tensor(data["t"]).double(), torch.as_tensor(Y).double(), hidden, ("Bayesian ridge",)),
        )


def motion() -> Iterator[tuple[str, Recording]]:
    """A test sequence with hidden joints or frames at half of the frame rate, and with hidden frames at the whole rate."""
    t, Y, joint, is_test = _joints(step=2)
    for name, columns in (("right leg", (joint >= 13) & (joint < 20)), ("upper body", joint >= 20)):
        yield f"motion, {name}", Recording(t, Y, is_test[:, None] & columns, ("Bayesian ridge", "5 nearest neighbours"))
    for step, name in ((2, "whole frames"), (1, "whole frames at the whole rate")):
        t, Y, _, is_test = _joints(step)
        test = is_test.nonzero().squeeze(1)
        hidden = torch.zeros(Y.shape, dtype=torch.bool)
        hidden[test[len(test) // 2] + torch.arange(-3, 3)] = True
        yield f"motion, {name}", Recording(t, Y, hidden, ("linear interpolation", "cubic spline"))


def _joints(step: int) -> tuple[Float[Tensor, " N"], Float[Tensor, "N D"], Int[Tensor, " D"], Bool[Tensor, " N"]]:
    """Times, angles that vary, their columns in the data, and whether a row is of the test sequence; every ``step``-th row."""
    data = load_arrays("cmu35_walkjog")
    train, test_rows = data["sequence"] < 8, data["sequence_test"] == 0
    rows = np.concatenate([data["Y"][train], data["Y_test"][test_rows]])[::step]
    number = np.concatenate([data["sequence"][train], np.full(test_rows.sum(), 8)])[::step]
    Y, sequence = torch.as_tensor(rows).double(), torch.as_tensor(number).double()
    moves = Y.std(0) > 1e-3
    moves[[0, 2]] = False  # the position of the root in the plane
    return torch.arange(len(Y)).double() + 1000.0 * sequence, Y[:, moves], moves.nonzero().squeeze(1), sequence == 8.0


def air() -> Iterator[tuple[str, Recording]]:
    """Hourly air quality, with the analysers or all columns hidden."""
    data = load_arrays("air_quality_uci")
    Y = torch.as_tensor(data["Y"][5500:7000]).double()
    known = ~Y.isnan().all(0)
    Y, names = Y[:, known], data["columns"][known.numpy()]
    Y = torch.where((Y.nan_to_num(1.0) > 0.0).all(0), Y.abs().log(), Y)
    t = torch.arange(len(Y), dtype=torch.float64)
    analysers = torch.as_tensor([str(name).endswith("(GT)") for name in names])
    fifth = (t // 24) % 5 == 3
    peers = ("Bayesian ridge", "independent GPs, Matérn-½ and daily")
    yield "air, analysers", Recording(t, Y, fifth[:, None] & analysers, peers, 24.0)
    yield "air, all columns", Recording(t, Y, (fifth & (t % 24 >= 12))[:, None].expand_as(Y).clone(), peers, 24.0)


TASKS = {"eeg_trials": eeg_trials, "motion": motion, "air": air}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure the estimator and its peers on all recordings, or on those of one task."""
    for task in [only] if only else list(TASKS):
        for name, recording in tqdm(list(TASKS[task]()), desc=task, unit="recording"):
            yield from measure(name, replace(recording, peers=()) if quick else recording, 3 if quick else None)


def measure(name: str, recording: Recording, max_iter: int | None) -> Iterator[Measurement]:
    """Scores of all methods on one recording."""
    t, Y, hidden = recording.t, recording.Y, recording.hidden
    for peer in recording.peers:
        start = time.perf_counter()
        mean, stddev = PEERS[peer](t, Y, hidden)
        seconds = time.perf_counter() - start
        for metric, value in recording.scores(mean, stddev, None):
            yield Measurement(name, peer, metric, value, seconds, {})
    start = time.perf_counter()
    estimator = GPVAERegressor(period=recording.period)
    if max_iter is not None:
        estimator.set_params(max_iter=max_iter, n_folds=1)
    predicted = estimator.fit(t, Y.masked_fill(hidden, torch.nan)).predict()
    seconds = time.perf_counter() - start
    for metric, value in recording.scores(predicted.mean, predicted.stddev, predicted.log_prob(Y)):
        yield Measurement(name, OURS, metric, value, seconds, {})
    for candidate, model in estimator.models_.items():
        alone = model.predict()
        for metric, value in recording.scores(alone.mean, alone.stddev, alone.log_prob(Y)):
            yield Measurement(name, f"{OURS}, {candidate} alone, where it has weight", metric, value, seconds, {})
