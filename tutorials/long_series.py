# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""A long series in linear time: `python -m tutorials.long_series [--steps N] [--days N] [--out FOLDER]`."""

# %% [markdown]
# # Fifty years of temperatures, day by day
#
# Eight stations in Trentino, from the valley floor to 2125 m, measured the highest temperature of each day from 1958 to 2007:
# 18 262 points in time.  A Gaussian process over them has a covariance matrix of 2.7 GB.  Under a Matérn kernel it is
# also a Gauss–Markov chain, so `StructuredGPGuide` uses a Kalman filter and smoother with a parallel scan instead:
# the same posterior and the same bound, in linear time and memory.
#
# We use it to fill gaps, with calibrated uncertainty, and to draw whole trajectories.

# %%
import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pyro
import torch
from matplotlib import pyplot as plt
from matplotlib.dates import ConciseDateFormatter
from torch import Tensor, nn

from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, Prediction
from pyro_lvgp.networks import FactorNet

STATIONS = ["T0147", "T0129", "T0010", "T0367", "T0032", "B6130", "T0064", "T0099"]  # from 203 to 2125 m
NUM_GAPS, GAP, YEAR = 400, 5, 365.25  # days


# %% [markdown]
# ## Data
#
# The yearly cycle of each station, two harmonics, is regressed out; the residual is the day's anomaly.  For
# evaluation, all stations are hidden for five days, four hundred times.


# %%
class Data(NamedTuple):
    """Temperatures [day, station] in °C."""

    dates: np.ndarray
    names: list[str]
    elevation: np.ndarray
    Y: Tensor  # NaN where missing
    hidden: Tensor  # which are not shown
    gaps: list[int]  # their first days
    cycle: Tensor  # of the year
    scale: Tensor  # standard deviations of the anomalies [station]

    @property
    def days(self) -> Tensor:
        """Inputs [day, 1]."""
        return torch.arange(len(self.Y), dtype=torch.float64)[:, None]

    @property
    def shown(self) -> Tensor:
        """Observed anomalies, in units of their standard deviation."""
        return ((self.Y - self.cycle) / self.scale).masked_fill(self.hidden, torch.nan)


def load(num_days: int | None) -> Data:
    """Select the first days of the series, or all."""
    weather = load_dataset("weather_trentino")
    columns = [list(weather["station"]).index(name) for name in STATIONS]
    Y = torch.as_tensor(weather["Y"][:num_days, columns, 1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.zeros(Y.shape, dtype=torch.bool)
    gaps = torch.randint(1, len(Y) - GAP, (NUM_GAPS,), generator=generator).tolist()
    for start in gaps:
        hidden[start : start + GAP] = True
    hidden &= ~Y.isnan()

    phase = 2.0 * math.pi / YEAR * torch.arange(len(Y), dtype=torch.float64)
    harmonics = [torch.ones_like(phase), *(f(k * phase) for k in (1, 2) for f in (torch.sin, torch.cos))]
    H, shown = torch.stack(harmonics, -1), Y.masked_fill(hidden, torch.nan)
    cycles = [H @ torch.linalg.lstsq(H[~y.isnan()], y[~y.isnan(), None]).solution for y in shown.T]
    cycle = torch.cat(cycles, -1)
    scale = (shown - cycle).square().nanmean(0).sqrt()
    names = [str(weather["location"][column]).split(" (")[0].title() for column in columns]
    return Data(weather["dates"][:num_days], names, weather["elev"][columns], Y, hidden, gaps, cycle, scale)


# %% [markdown]
# ## Model and guide
#
# Two processes, of which each is a sum: weather, with a lengthscale of days, and seasonal anomalies, with a lengthscale of
# months. A linear decoder mixes them.  The encoder multiplies Gaussian sites, one for each station that reports.
# `method="auto"`, the default, chooses the state-space method, since the kernels are Matérn kernels of one input and there are
# many points.

# %%
NUM_LATENTS = 2
BOUND = StructuredELBO(max_plate_nesting=1)


def make(method: Any = "auto") -> tuple[GPVAE, StructuredGPGuide]:
    """Model and guide for seed 0."""
    pyro.set_rng_seed(0)
    batch, num_stations = (NUM_LATENTS,), len(STATIONS)
    kernel = Matern(1, 0.5, lengthscale=4.0, batch_shape=batch)
    kernel += Matern(1, 1.5, lengthscale=60.0, variance=0.2, batch_shape=batch)
    model = GPVAE(kernel, nn.Linear(NUM_LATENTS, num_stations), Gaussian(0.3, data_dim=num_stations)).double()
    encoder = FactorNet(num_stations, NUM_LATENTS).double()
    return model, StructuredGPGuide(model, encoders={"f": encoder}, method=method, num_eval_site_updates=0)


# %% [markdown]
# ## Cost of a step
#
# Seconds of a training step, forward and backward, on the first days.  `method="dense"` takes the Cholesky factor.


# %%
def seconds_of_steps(data: Data) -> dict[str, dict[int, float]]:
    """Seconds of a step by method and number of days."""
    sizes = {"dense": (125, 250, 500, 1000, 2000), "state-space": (125, 250, 500, 1000, 2000, 4000, 8000, len(data.Y))}
    result: dict[str, dict[int, float]] = {}
    for method, days in sizes.items():
        for num in sorted({min(num, len(data.Y)) for num in days}):
            pyro.clear_param_store()
            model, guide = make(method)
            args = data.days[:num], data.shown[:num]
            guide(*args)
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                BOUND.differentiable_loss(model, guide, *args).backward()
                seconds.append(time.perf_counter() - start)
            result.setdefault(method, {})[num] = min(seconds)
    pyro.clear_param_store()
    return result


def draw_seconds(seconds: dict[str, dict[int, float]]) -> plt.Figure:
    """Seconds over the number of days, both axes logarithmic."""
    figure, ax = plt.subplots(figsize=(5.0, 3.4), layout="constrained")
    for (method, values), colour in zip(seconds.items(), ("#CC6677", "#332288"), strict=True):
        ax.loglog(list(values), list(values.values()), "o-", color=colour, label=method)
    ax.set(xlabel="days", ylabel="seconds for a step")
    ax.legend(frameon=False)
    return figure


# %% [markdown]
# ## Gaps
#
# Predictions in a gap depend on the days before and after it.  The guide is compared with the yearly cycle alone, with the
# variance of the anomalies, and with linear interpolation, with the variance of its errors.  The share of hidden days in the
# central 90 % should be 90 %.


# %%
class Guess(NamedTuple):
    """Mean and standard deviation [day, station] in °C."""

    mean: Tensor
    stddev: Tensor


def from_cycle(data: Data) -> Guess:
    """Predictions by the yearly cycle alone."""
    return Guess(data.cycle, data.scale.expand_as(data.cycle))


def from_lines(data: Data) -> Guess:
    """Predictions by linear interpolation of the anomalies before and after."""
    days, mean = data.days[:, 0].numpy(), data.cycle.clone()
    for j, y in enumerate(data.shown.T):
        seen = ~y.isnan()
        mean[:, j] += data.scale[j] * torch.as_tensor(np.interp(days, days[seen], y[seen]))
    stddev = (data.Y - mean)[data.hidden].std()
    return Guess(mean, stddev.expand_as(mean))


def from_guide(data: Data, predicted: Prediction) -> Guess:
    """Gaussians with the moments of the mixture, in °C."""
    return Guess(data.cycle + data.scale * predicted.mean, data.scale * predicted.stddev)


def summarise(guesses: dict[str, Guess], data: Data) -> str:
    """Scores of the hidden days as a markdown table."""
    lines = ["| hidden days | RMSE [°C] | inside 90 % | width of 90 % [°C] | NLPD |", f"|---|{'---:|' * 4}"]
    for name, (mean, stddev) in guesses.items():
        error, stddev = (data.Y - mean)[data.hidden], stddev[data.hidden]
        inside = (error.abs() < 1.645 * stddev).double().mean()
        nlpd = (0.5 * (error / stddev).square() + stddev.log() + 0.5 * math.log(2.0 * math.pi)).mean()
        rmse = error.square().mean().sqrt()
        lines.append(f"| {name} | {rmse:.2f} | {inside:.1%} | {2 * 1.645 * stddev.mean():.1f} | {nlpd:.3f} |")
    return "\n".join(lines)


def draw_gap(guess: Guess, draws: Tensor, data: Data, gap: int = 5) -> plt.Figure:
    """Three stations around a gap: valley, middle, summit."""
    start = data.gaps[gap]
    window = slice(max(start - 14, 0), start + GAP + 14)
    figure, axes = plt.subplots(3, 1, figsize=(9.0, 6.6), sharex=True, layout="constrained")
    for ax, j in zip(axes, (0, 3, 7), strict=True):
        dates, Y, hidden = data.dates[window], data.Y[window, j], data.hidden[window, j]
        mean, spread = guess.mean[window, j], 1.645 * guess.stddev[window, j]
        ax.fill_between(dates, mean - spread, mean + spread, color="#332288", alpha=0.15, linewidth=0)
        ax.plot(dates, draws[:4, window, j].T, color="#332288", linewidth=0.6, alpha=0.5)
        ax.plot(dates, mean, color="#332288", label="mean, central 90 %, four draws")
        ax.plot(dates, data.cycle[window, j], color="0.5", linestyle=":", label="yearly cycle")
        ax.plot(dates[~hidden], Y[~hidden], ".", color="0.2", label="shown")
        ax.plot(dates[hidden], Y[hidden], "o", markersize=5, markerfacecolor="none", color="#CC6677", label="hidden")
        ax.set_ylabel(f"{data.names[j]}, {data.elevation[j]:.0f} m\n[°C]")
        ax.set_ylim(top=ax.get_ylim()[1] + (5.0 if ax is axes[0] else 0.0))
    axes[0].legend(frameon=False, fontsize="small", ncols=4, loc="upper center")
    axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(axes[-1].xaxis.get_major_locator()))
    return figure


# %% [markdown]
# ## Trajectories
#
# Were all five days of a gap warmer than usual?  Weather persists, so that the days cannot be judged one by one.  With
# `joint=True` the draws are trajectories of 18 262 points, in linear time too; otherwise each day is drawn from its marginal.
# The Brier score is the mean squared error of the probabilities.


# %%
def all_warm(Y: Tensor, data: Data) -> Tensor:
    """Compute whether all days of each gap were warmer than the cycle [..., gap, station]."""
    anomalies = Y - data.cycle
    return torch.stack([(anomalies[..., start : start + GAP, :] > 0.0).all(-2) for start in data.gaps], -2).double()


def summarise_gaps(draws: dict[str, Tensor], data: Data) -> str:
    """Scores over gaps and stations as a markdown table."""
    truth = all_warm(data.Y, data)
    lines = ["| five warm days | share | Brier score |", "|---|---:|---:|", f"| observed | {truth.mean():.1%} | |"]
    for name, drawn in draws.items():
        probability = all_warm(drawn, data).mean(0)
        lines.append(f"| {name} | {probability.mean():.1%} | {(probability - truth).square().mean():.3f} |")
    return "\n".join(lines)


# %%
def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of the fit")
    parser.add_argument("--days", type=int, help="length of the series; all by default")
    parser.add_argument("--out", type=Path, default=Path("out/long_series"), help="folder for pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    start = time.perf_counter()

    data = load(options.days)
    seconds = draw_seconds(seconds_of_steps(data))
    model, guide = make()
    how = {"num_steps": options.steps, "optim": JointAdam(lr=0.05), "callbacks": [LRSchedule("cosine")]}
    history = fit(model, guide, data.days, data.shown, loss=BOUND, **how)
    print(f"{len(data.Y)} days, {options.steps} steps in {history.seconds[-1]:.0f} s")
    marginal, joint = (model.predict(guide, data.days, data.shown, joint=joint) for joint in (False, True))
    guess = from_guide(data, marginal)
    print("\n" + summarise({"yearly cycle": from_cycle(data), "straight lines": from_lines(data), "GP-VAE": guess}, data))
    draws = {name: data.cycle + data.scale * part.sample() for name, part in (("marginals", marginal), ("joint", joint))}
    print("\n" + summarise_gaps(draws, data) + "\n")

    figures = {"seconds": seconds, "gap": draw_gap(guess, draws["joint"], data)}
    for name, figure in figures.items():
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(options.out / f"{name}.png", dpi=110)
    print(f"wrote pictures to {options.out} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
