# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""Poisson spike counts by your own Pyro model: `python -m tutorials.spike_counts [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # Latent processes behind spike counts
#
# Fifteen neurons are recorded in repeated trials; two unseen processes drive their rates.  The model is plain Pyro with a
# Gaussian-process prior at one site.  We fit it by a mean-field guide, and by `StructuredGPGuide`, which keeps that prior and
# multiplies it by a Gaussian site for each bin, whose parameters are free or come from an encoder of the counts.  All have the
# same data and maximise the same bound.  The counts are simulated, so that we know the rates; in every other trial each neuron
# is missing with probability ½.

# %%
import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, init_to_value
from torch import Tensor

from pyro_lvgp import plots
from pyro_lvgp.guides import MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.infer import FitResult, JointAdam, LRSchedule, StructuredELBO, fit
from pyro_lvgp.networks import ZeroImputation

NUM_TRAINED, NUM_NEW, NUM_BINS, NUM_NEURONS, NUM_LATENTS = 40, 40, 40, 15, 2
TIMES = torch.linspace(0.0, 2.0, NUM_BINS)[:, None]  # seconds


# %% [markdown]
# ## The model
#
# Counts in a bin are Poisson with log rate $b_d + \sum_q w_{dq} f_q(t)$, where each $f_q$ is a smooth process of its own in
# every trial.  `NaN` is a neuron that was not recorded.  The number of trials is that of the data, so that the same model
# serves new trials.


# %%
def log_rate(f: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    """Log rates [..., trial, bin, neuron] from processes [..., trial, latent, bin]."""
    return (weights @ f).mT + base


def model(t: Tensor, counts: Tensor) -> Tensor:
    """Two processes in every trial, and the neurons' weights, which all trials share."""
    weights = pyro.sample("weights", dist.Normal(torch.zeros(NUM_NEURONS, NUM_LATENTS), 0.6).to_event(2))
    base = pyro.sample("base", dist.Normal(torch.zeros(NUM_NEURONS), 1.0).to_event(1))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
    distance = math.sqrt(3.0) * (t - t.mT).abs() / lengthscale[..., None, None]
    covariance = (1.0 + distance) * (-distance).exp() + 1e-4 * torch.eye(len(t))  # Matérn-3/2
    with pyro.plate("trials", len(counts), dim=-1):
        prior = dist.MultivariateNormal(torch.zeros(NUM_LATENTS, len(t)), covariance[..., None, :, :])
        f = pyro.sample("f", prior.to_event(1))
        rates = dist.Poisson(log_rate(f, weights, base[..., None, :]).exp())
        recorded = ~torch.isnan(counts)
        return pyro.sample("counts", rates.mask(recorded).to_event(2), obs=torch.nan_to_num(counts))


class Recording(NamedTuple):
    """Trials and their true rates."""

    counts: Tensor  # [trial, bin, neuron], NaN where not recorded
    rates: Tensor  # expected counts [trial, bin, neuron]


def simulate() -> tuple[Recording, Recording]:
    """Training trials and new trials."""
    pyro.set_rng_seed(0)
    given = {"weights": 0.6 * torch.randn(NUM_NEURONS, NUM_LATENTS), "base": 0.5 * torch.randn(NUM_NEURONS)}
    given["lengthscale"] = torch.tensor(0.3)
    blank = torch.full((NUM_TRAINED + NUM_NEW, NUM_BINS, NUM_NEURONS), torch.nan)
    f = poutine.trace(poutine.condition(model, given)).get_trace(TIMES, blank).nodes["f"]["value"]
    rates = log_rate(f, given["weights"], given["base"]).exp()
    lost = (torch.rand(len(rates), 1, NUM_NEURONS) < 0.5) & (torch.arange(len(rates)) % 2 == 1)[:, None, None]
    counts = torch.poisson(rates).masked_fill(lost, torch.nan)
    return Recording(counts[:NUM_TRAINED], rates[:NUM_TRAINED]), Recording(counts[NUM_TRAINED:], rates[NUM_TRAINED:])


# %% [markdown]
# ## Three guides
#
# `encoders` names the site and its encoder, which takes one bin of one trial: `ZeroImputation` takes the counts, zero where a
# neuron is missing, and the mask.  Its inputs are square roots of the counts, whose variance does not depend on the rate.
# Weights, base rates and lengthscale get mean-field Gaussians.  With the encoder, the weights start at a draw from the prior:
# it is uninformative at first, and a process with weights near zero would be pruned.  The bound takes marginals of the
# processes only.

# %%
MEAN_FIELD, OWN, ENCODED = "mean field", "structured, own sites", "structured, encoder"


class CountNet(ZeroImputation):
    """Encoder of counts."""

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(y.sqrt())


def make_guides() -> dict[str, AutoGuide]:
    """Guides by name."""
    start = init_to_value(values={"weights": 0.6 * torch.randn(NUM_NEURONS, NUM_LATENTS)})
    return {
        MEAN_FIELD: MeanFieldGuide(model),
        OWN: StructuredGPGuide(model, encoders={"f": None}, init_scale=1.0),
        ENCODED: StructuredGPGuide(model, encoders={"f": CountNet(NUM_NEURONS, NUM_LATENTS)}, init_loc_fn=start),
    }


def fit_all(guides: dict[str, AutoGuide], counts: Tensor, num_steps: int) -> dict[str, FitResult]:
    """Fit each guide in the same way."""
    histories = {}
    for name, guide in guides.items():
        print(f"\n{name}")
        loss = StructuredELBO(max_plate_nesting=1)
        how = {"num_steps": num_steps, "optim": JointAdam(lr=0.02), "callbacks": [LRSchedule("cosine")]}
        histories[name] = fit(model, guide, TIMES, counts, loss=loss, **how)
    return histories


# %% [markdown]
# ## Rates
#
# A guide with an encoder serves trials outside the training set; the others have no parameters for them.


# %%
@torch.no_grad()
def rates(guide: AutoGuide, counts: Tensor, num_draws: int = 50) -> Tensor:
    """Draws of the expected counts [draw, trial, bin, neuron]."""
    draws = (guide(TIMES, counts) for _ in range(num_draws))
    return torch.stack([log_rate(draw["f"], draw["weights"], draw["base"]).exp() for draw in draws])


def error(drawn: Tensor, recording: Recording, lost: bool) -> float:
    """Root mean squared error of log rates, of missing and of recorded neurons."""
    which = torch.isnan(recording.counts) == lost
    return (drawn.log().mean(0) - recording.rates.log())[which].square().mean().sqrt().item()


def coverage(drawn: Tensor, recording: Recording) -> float:
    """Share of true rates, of all neurons, inside intervals that contain 95 % of the draws."""
    low, high = drawn.flatten(1).quantile(torch.tensor([0.025, 0.975]), 0).unbind(0)
    truth = recording.rates.flatten()
    return ((low <= truth) & (truth <= high)).float().mean().item()


def report(guides: dict[str, AutoGuide], histories: dict[str, FitResult], trained: Recording, new: Recording) -> None:
    """Print a table: a row for each guide and kind of trial."""
    print("\n| guide | trials | bound [nats/count] | error, recorded | error, lost | coverage | lengthscale [s] | seconds |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name, guide in guides.items():
        bound = f"{np.mean(histories[name].bounds_per_entry[-50:]):.4f}"
        lengthscale = f"{guide.median(TIMES, trained.counts)['lengthscale']:.2f}"
        fitted = [bound, lengthscale, f"{histories[name].seconds[-1]:.0f}"]
        for kind, recording in {"trained on": trained, "new": new}.items():
            if kind == "new" and name != ENCODED:
                continue
            drawn = rates(guide, recording.counts, num_draws=200)
            errors = " | ".join(f"{error(drawn, recording, lost):.3f}" for lost in (False, True))
            shown = fitted if kind == "trained on" else ["", "", ""]
            print(f"| {name} | {kind} | {shown[0]} | {errors} | {coverage(drawn, recording):.2f} | {shown[1]} | {shown[2]} |")


# %% [markdown]
# ## Figures
#
# A new trial: the rates of four recorded and four missing neurons, with the counts, and bands of the posterior.


# %%
def draw_trial(guide: AutoGuide, new: Recording, trial: int = 1) -> Figure:
    """Rates of eight neurons in a new trial."""
    drawn = rates(guide, new.counts[trial : trial + 1], num_draws=200)[:, 0]
    counts, truth = new.counts[trial], new.rates[trial]
    lost = torch.isnan(counts).any(0)
    chosen = torch.cat([torch.arange(NUM_NEURONS)[~lost][:4], torch.arange(NUM_NEURONS)[lost][:4]])
    names = [f"neuron {d}" + ("\n(lost)" if lost[d] else "") for d in chosen]
    figure, axes = plt.subplots(2, 4, figsize=(10.0, 4.2), sharex=True, layout="constrained")
    low, middle, high = drawn.quantile(torch.tensor([0.025, 0.5, 0.975]), 0)
    for ax, d, name in zip(axes.flatten(), chosen, names, strict=False):
        time_axis = TIMES[:, 0]
        ax.fill_between(time_axis, low[:, d], high[:, d], color=plots.PALETTE[0], alpha=0.18, linewidth=0)
        ax.plot(time_axis, middle[:, d], color=plots.PALETTE[0], label="median, 95 % band")
        ax.plot(time_axis, truth[:, d], color=plots.PALETTE[1], label="true rate")
        ax.plot(time_axis, counts[:, d], ".", color="#333333", markersize=3, label="counts")
        ax.set_title(name, fontsize="small")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("time [s]")
    for ax in axes[:, 0]:
        ax.set_ylabel("counts per bin")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    return figure


# %%
def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each fit")
    parser.add_argument("--out", type=Path, default=Path("out/spike_counts"), help="folder for pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    start = time.perf_counter()

    trained, new = simulate()
    guides = make_guides()
    histories = fit_all(guides, trained.counts, options.steps)
    report(guides, histories, trained, new)

    draw_trial(guides[ENCODED], new).savefig(options.out / "new_trial.png", dpi=110)
    bounds = plots.plot_bounds(
        {name: history.bounds_per_entry for name, history in histories.items()}, ylabel="bound per count [nats]"
    )
    bounds.figure.savefig(options.out / "bounds.png", dpi=110)
    print(f"wrote pictures to {options.out} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
