# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""Missing data in a multichannel series: `python -m tutorials.missing_channels [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # Missing channels of an EEG
#
# Seven electrodes record an EEG for a second.  In its last 100 samples three of them, FZ, F1 and F2, are hidden.
# A GP-VAE explains all channels by a few latent processes, and predicts hidden entries from the observed
# channels and from neighbouring samples.  We fit it twice: by the plain bound, and with `corruption`, which hides gaps like
# those of the data from the encoder, so that it learns to fill them.

# %%
import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from pyro_lvgp import plots
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import Corruption, IndexNet, mask_like_shifted


class Recording(NamedTuple):
    """EEG, standardised by the moments of its observed entries."""

    t: Tensor  # seconds [sample, 1]
    truth: Tensor  # [sample, electrode]
    seen: Tensor  # the same, NaN where hidden
    scale: Tensor  # microvolts in a unit [electrode]
    centre: Tensor  # microvolts [electrode]
    names: list[str]


def load() -> Recording:
    """One trial of one person."""
    data = load_dataset("eeg")
    Y = torch.as_tensor(data["Y"])
    seen = Y.masked_fill(torch.as_tensor(data["test_mask"]), torch.nan)
    centre = seen.nanmean(0)
    scale = (seen - centre).square().nanmean(0).sqrt()
    t = torch.as_tensor(data["t"])[:, None]
    return Recording(t, (Y - centre) / scale, (seen - centre) / scale, scale, centre, [str(name) for name in data["columns"]])


# %% [markdown]
# ## Model and guide
#
# Two rough processes in time, and four latents without correlation in time (`independent_dim`), go through a linear decoder;
# each electrode has noise of its own.  The model contains factor analysis, a strong baseline here, and adds correlation in
# time.  Both kinds of latents have an encoder that sums the outputs of one network for each electrode, so that any electrode
# may be missing.

# %%
SMOOTH, WHITE = 2, 4


class Filled(NamedTuple):
    """Fit and its predictions of all entries."""

    mean: Tensor
    stddev: Tensor
    latents: tuple[Tensor, Tensor]  # mean and standard deviation of the processes [sample, latent]
    seconds: float


def fill(recording: Recording, corruption: Corruption | None, num_steps: int) -> Filled:
    """Fit, and predict all entries."""
    num_electrodes = recording.seen.shape[1]
    torch.manual_seed(0)
    kernel = Matern(1, 0.5, lengthscale=0.02, batch_shape=(SMOOTH,))
    decoder = nn.Linear(SMOOTH + WHITE, num_electrodes)
    model = GPVAE(kernel, decoder, Gaussian(0.1, data_dim=num_electrodes), independent_dim=WHITE).double()
    encoders = {"f": IndexNet(num_electrodes, SMOOTH).double(), "w": IndexNet(num_electrodes, WHITE).double()}
    guide = StructuredGPGuide(model, encoders=encoders, num_eval_site_updates=0)
    loss = StructuredELBO(corruption=corruption, max_plate_nesting=1)
    history = fit(model, guide, recording.t, recording.seen, loss=loss, num_steps=num_steps, callbacks=[LRSchedule("cosine")])
    predicted = model.predict(guide, recording.t, recording.seen, num_samples=200)
    quantiles = guide.quantiles([0.1586553, 0.5], recording.t, recording.seen)["f"]
    latents = quantiles[1].mT, (quantiles[1] - quantiles[0]).mT
    return Filled(predicted.mean, predicted.stddev, latents, history.seconds[-1])


# %% [markdown]
# ## Scores
#
# SMSE is the mean squared error over the variance of the hidden samples, averaged over electrodes: 1 is as good as their mean.
# NLL is the mean negative log density of hidden entries, in microvolts.  The baseline is ridge regression on the four observed
# electrodes.


# %%
def scores(recording: Recording, mean: Tensor, stddev: Tensor) -> tuple[float, float]:
    """SMSE and NLL of the hidden entries."""
    hidden = torch.isnan(recording.seen)
    errors = []
    for guess, truth, rows in zip(mean.T, recording.truth.T, hidden.T, strict=True):
        if rows.any():
            errors.append(((guess - truth)[rows].square().mean() / truth[rows].var(correction=0)).item())
    log_prob = torch.distributions.Normal(mean, stddev).log_prob(recording.truth) - recording.scale.log()
    return float(np.mean(errors)), -log_prob[hidden].mean().item()


def ridge(recording: Recording) -> tuple[Tensor, Tensor]:
    """Bayesian ridge regression on the electrodes that are never hidden."""
    hidden = torch.isnan(recording.seen)
    mean, stddev = recording.truth.clone(), torch.ones_like(recording.truth)
    inputs = recording.truth[:, ~hidden.any(0)].numpy()
    for d in hidden.any(0).nonzero().squeeze(1).tolist():
        rows = hidden[:, d].numpy()
        fitted = BayesianRidge().fit(inputs[~rows], recording.truth[~rows, d].numpy())
        guess, spread = fitted.predict(inputs[rows], return_std=True)
        mean[rows, d], stddev[rows, d] = torch.as_tensor(guess), torch.as_tensor(spread)
    return mean, stddev


# %% [markdown]
# ## Figures


# %%
def draw_latents(t: Tensor, filled: Filled) -> Figure:
    """Plot the latent processes, with bands of two standard deviations."""
    figure, ax = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    for k, (mean, stddev) in enumerate(zip(filled.latents[0].T, filled.latents[1].T, strict=True)):
        ax.fill_between(t[:, 0], mean - 2 * stddev, mean + 2 * stddev, color=plots.PALETTE[k], alpha=0.2, linewidth=0)
        ax.plot(t[:, 0], mean, color=plots.PALETTE[k], label=f"process {k}")
    ax.set(xlabel="time [s]", ylabel="latent [prior sd]")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", ncols=SMOOTH)
    return figure


def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="steps of each fit")
    parser.add_argument("--out", type=Path, default=Path("out/missing_channels"), help="folder for pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    start = time.perf_counter()

    recording = load()
    fills = {}
    for name, corruption in {"GP-VAE": None, "GP-VAE, corruption": mask_like_shifted}.items():
        print(f"\n{name}")
        fills[name] = fill(recording, corruption, options.steps)
    rows = {name: (*scores(recording, filled.mean, filled.stddev), filled.seconds) for name, filled in fills.items()}
    rows = {"Bayesian ridge": (*scores(recording, *ridge(recording)), math.nan), **rows}
    print("\n| method | SMSE | NLL | seconds |\n|---|---:|---:|---:|")
    for name, (smse, nll, seconds) in rows.items():
        print(f"| {name} | {smse:.3f} | {nll:.3f} | {'–' if math.isnan(seconds) else round(seconds)} |")

    best = fills["GP-VAE, corruption"]
    t, (_, truth, seen, scale, centre, names) = recording.t[:, 0], recording
    microvolts = {"seen": centre + scale * seen, "truth": centre + scale * truth}
    figures = {
        "electrodes": plots.plot_series(
            t, centre + scale * best.mean, scale * best.stddev, **microvolts, names=names, xlabel="time [s], channels in µV"
        ),
        "latents": draw_latents(recording.t, best),
    }
    for name, figure in figures.items():
        figure.savefig(options.out / f"{name}.png", dpi=110)
    print(f"\nwrote {', '.join(f'{name}.png' for name in figures)} to {options.out} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
