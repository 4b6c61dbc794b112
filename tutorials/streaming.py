# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""A weather stream, week by week, without retraining: `python -m tutorials.streaming [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # A stream, week by week
#
# A sparse GP-VAE is fitted to a year of daily maximum temperatures at twenty stations.  Then the next year arrives, a week at
# a time.  The encoder maps each day to Gaussian sites, by which the posterior is updated: inducing points are
# added at the new days and removed at old days, and no parameter is trained again.

# %%
import argparse
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pyro
import torch
from matplotlib import pyplot as plt
from torch import nn

from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.infer import LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import IndexNet, mask_entries

FIRST_DAY, NUM_STATIONS, NUM_LATENTS = np.datetime64("1996-01-01"), 20, 4
DAYS, WEEK, KEPT = 366, 7, 8  # of the training year, of a piece, and weeks of inducing points to keep
SPACING = 1.0  # days between inducing points: weather changes from day to day


# %% [markdown]
# The data: anomalies from a mean annual wave.  In the second year a fifth of the entries is hidden for evaluation.


# %%
class Stream(NamedTuple):
    """Days, anomalies [days, stations] in units of their standard deviation [°C], and the mask of hidden entries."""

    day: torch.Tensor
    y: torch.Tensor
    hidden: torch.Tensor
    scale: float


def load() -> Stream:
    """Data of two years."""
    data = load_dataset("weather_trentino")
    rows = (data["dates"] >= FIRST_DAY) & (data["dates"] < FIRST_DAY + DAYS + 52 * WEEK)
    warmest = torch.as_tensor(data["Y"][rows, :, 1], dtype=torch.float64)
    fullest = torch.isnan(warmest).sum(0).argsort(stable=True)[:NUM_STATIONS]
    warmest, day = warmest[:, fullest], torch.arange(len(warmest), dtype=torch.float64)[:, None]
    wave = torch.cat([torch.ones_like(day), (2 * np.pi * day / 365.25).cos(), (2 * np.pi * day / 365.25).sin()], 1)
    mean = torch.zeros_like(warmest)
    for station in range(NUM_STATIONS):
        seen = ~torch.isnan(warmest[:DAYS, station])
        fitted = torch.linalg.lstsq(wave[:DAYS][seen], warmest[:DAYS][seen, station][:, None]).solution
        mean[:, station] = (wave @ fitted)[:, 0]
    scale = (warmest - mean)[:DAYS].square().nanmean().sqrt().item()
    hidden = torch.rand(warmest.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    hidden[:DAYS] = False
    return Stream(day, (warmest - mean) / scale, hidden, scale)


# %% [markdown]
# The model: four processes over time behind a linear decoder, with an inducing point a day.  In training the encoder takes
# four fifths of the observed entries, and the likelihood all of them.


# %%
def train(stream: Stream, num_steps: int) -> tuple[SparseGPVAE, SparseStructuredGPGuide]:
    """Fit the first year."""
    kernel = Matern(1, 1.5, lengthscale=torch.tensor([[3.0], [3.0], [5.0], [10.0]]), batch_shape=(NUM_LATENTS,))
    Z = torch.arange(0.0, DAYS, SPACING)[:, None]
    model = SparseGPVAE(kernel, nn.Linear(NUM_LATENTS, NUM_STATIONS), Z, Gaussian(0.1, data_dim=NUM_STATIONS)).double()
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(NUM_STATIONS, NUM_LATENTS, init_scale=0.3).double()})
    bound = StructuredELBO(corruption=mask_entries(0.2))
    fit(model, guide, stream.day[:DAYS], stream.y[:DAYS], loss=bound, num_steps=num_steps, callbacks=[LRSchedule("cosine")])
    return model, guide


# %% [markdown]
# The stream.  Hidden entries of each week are first predicted from entries observed on the same days and before; then
# the posterior is updated with the week.


# %%
class Reading(NamedTuple):
    """Predictions [days, stations] of the second year, in °C from the mean, and seconds for each piece."""

    mean: torch.Tensor
    stddev: torch.Tensor
    seconds: list[float]


def read(stream: Stream, model: SparseGPVAE, guide: SparseStructuredGPGuide) -> tuple[Reading, Reading]:
    """Predictions week by week, and from all data at once, which include the future."""
    visible = stream.y.masked_fill(stream.hidden, torch.nan)
    guide.condition(stream.day[:DAYS], visible[:DAYS])
    means, stddevs, seconds = [], [], []
    for week in torch.arange(DAYS, len(stream.day)).split(WEEK):
        start, day = time.perf_counter(), stream.day[week]
        Z = model.inducing_points.detach()
        recent = Z[Z[:, 0] > day[0, 0] - KEPT * WEEK]
        first = recent.max() + SPACING
        guide.condition(
            day,
            visible[week],
            inducing_points=torch.cat([recent, torch.arange(first.item(), day[-1, 0].item() + SPACING, SPACING)[:, None]]),
        )
        predicted = model.predict(guide, day, torch.full_like(visible[week], torch.nan), num_samples=200)
        means.append(predicted.mean)
        stddevs.append(predicted.stddev)
        seconds.append(time.perf_counter() - start)
    weekly = Reading(torch.cat(means) * stream.scale, torch.cat(stddevs) * stream.scale, seconds)

    start = time.perf_counter()
    guide.restore(None)
    model.inducing_points = torch.arange(DAYS, len(stream.day), SPACING, dtype=torch.float64)[:, None]
    predicted = model.predict(guide, stream.day[DAYS:], visible[DAYS:], num_samples=200)
    whole = Reading(predicted.mean * stream.scale, predicted.stddev * stream.scale, [time.perf_counter() - start])
    return weekly, whole


# %% [markdown]
# Scores: root mean squared error and mean negative log density of the hidden temperatures, beside the mean of the
# stations observed on the same day, and beside the seasonal mean alone.


# %%
def summarise(stream: Stream, readings: dict[str, Reading]) -> str:
    """Scores as a markdown table."""
    truth, hidden = stream.y[DAYS:] * stream.scale, stream.hidden[DAYS:] & ~torch.isnan(stream.y[DAYS:])
    same_day = truth.masked_fill(hidden, torch.nan).nanmean(1, keepdim=True).expand_as(truth)
    lines = ["| hidden temperatures of the second year | RMSE [°C] | NLL | seconds a week |", "|---|---:|---:|---:|"]
    for name, mean in (("seasonal mean", torch.zeros_like(truth)), ("mean of the day", same_day)):
        lines.append(f"| {name} | {(mean - truth)[hidden].square().mean().sqrt():.2f} | – | – |")
    for name, reading in readings.items():
        error = (reading.mean - truth)[hidden].square().mean().sqrt()
        nll = -torch.distributions.Normal(reading.mean[hidden], reading.stddev[hidden]).log_prob(truth[hidden]).mean()
        each = f"{np.mean(reading.seconds):.2f}" if len(reading.seconds) > 1 else "–"
        lines.append(f"| {name} | {error:.2f} | {nll:.2f} | {each} |")
    return "\n".join(lines)


# %% [markdown]
# The figures: a station's spring with its hidden entries, and the seconds for each week.


# %%
def draw(stream: Stream, weekly: Reading, out: Path) -> None:
    """Draw and save the figures."""
    days, station = slice(60, 150), int(stream.hidden[DAYS:].sum(0).argmax())
    x, truth = np.arange(60, 150), (stream.y[DAYS:] * stream.scale)[days, station]
    hidden, mean, stddev = stream.hidden[DAYS:][days, station], weekly.mean[days, station], weekly.stddev[days, station]
    figure, ax = plt.subplots(figsize=(9, 3.5), layout="constrained")
    ax.fill_between(x, mean - 2 * stddev, mean + 2 * stddev, color="C0", alpha=0.25, lw=0, label="mean ± 2 sd, as it came")
    ax.plot(x, mean, color="C0")
    ax.plot(x[~hidden], truth[~hidden], "k.", label="seen")
    ax.plot(x[hidden], truth[hidden], "o", color="C3", mfc="none", label="hidden")
    ax.set(xlabel="day of the second year", ylabel="anomaly of the maximum [°C]")
    ax.legend(ncols=3, loc="upper right")
    figure.savefig(out / "stream.png", dpi=150)

    figure, ax = plt.subplots(figsize=(9, 2.5), layout="constrained")
    ax.plot(weekly.seconds, ".-")
    ax.set(xlabel="week", ylabel="seconds", ylim=(0, None))
    figure.savefig(out / "seconds.png", dpi=150)


def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="steps of the fit")
    parser.add_argument("--out", type=Path, default=Path("out/streaming"), help="folder for pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    stream = load()
    model, guide = train(stream, options.steps)
    weekly, whole = read(stream, model, guide)
    print("\n" + summarise(stream, {"week by week": weekly, "all at once": whole}) + "\n")
    draw(stream, weekly, options.out)
    print(f"wrote {', '.join(sorted(path.name for path in options.out.iterdir()))} to {options.out}")


if __name__ == "__main__":
    main()
