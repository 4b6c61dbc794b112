# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""Spatial interpolation of several metals in soil: `python -m tutorials.soil [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # Cadmium in soil
#
# Cadmium, nickel and zinc were measured in the soil of 359 places of the Swiss Jura.  At 100 places only
# the other two are known.  A GP-VAE over the plane interpolates cadmium from cadmium near by, and from the other metals at the
# place.  Concentrations are positive and skewed: we model their logarithms, so that predictions are log-normal.

# %%
import argparse
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from pyro_lvgp import plots
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import IndexNet, mask_like_rows

METALS = ("Cd", "Ni", "Zn")


class Survey(NamedTuple):
    """Measurements, and their standardised logarithms."""

    places: Tensor  # km [place, 2]
    metals: Tensor  # mg/kg [place, metal]
    seen: Tensor  # standardised logarithms [place, metal], NaN where hidden
    scale: Tensor  # standard deviations of logarithms [metal]
    centre: Tensor  # their means [metal]


def load() -> Survey:
    """Load the survey, with cadmium hidden at the sites of the test set."""
    data = load_dataset("jura")
    columns = [list(data["columns"]).index(metal) for metal in METALS]
    metals = torch.as_tensor(data["Y"])[:, columns]
    logs = metals.log().masked_fill(torch.as_tensor(data["test_mask"])[:, columns], torch.nan)
    centre = logs.nanmean(0)
    scale = (logs - centre).square().nanmean(0).sqrt()
    return Survey(torch.as_tensor(data["X"]), metals, (logs - centre) / scale, scale, centre)


# %% [markdown]
# ## Model and guide
#
# Two rough processes over the plane and two latents of each place alone, through a linear decoder: in geostatistics, a linear
# model of coregionalisation.  The encoder learns to work without cadmium, since `mask_like_rows` hides the entries of each
# place that are missing at another place, drawn at random.

# %%
SMOOTH, LOCAL = 2, 2


def train(survey: Survey, num_steps: int) -> tuple[GPVAE, StructuredGPGuide]:
    """Fit to the observed measurements."""
    torch.manual_seed(0)
    kernel = Matern(2, 0.5, lengthscale=0.5, batch_shape=(SMOOTH,))
    decoder, likelihood = nn.Linear(SMOOTH + LOCAL, len(METALS)), Gaussian(0.1, data_dim=len(METALS))
    model = GPVAE(kernel, decoder, likelihood, independent_dim=LOCAL).double()
    encoders = {"f": IndexNet(len(METALS), SMOOTH).double(), "w": IndexNet(len(METALS), LOCAL).double()}
    guide = StructuredGPGuide(model, encoders=encoders, num_eval_site_updates=0)
    loss = StructuredELBO(corruption=mask_like_rows, max_plate_nesting=1)
    fit(model, guide, survey.places, survey.seen, loss=loss, num_steps=num_steps, callbacks=[LRSchedule("cosine")])
    return model, guide


# %% [markdown]
# ## Scores
#
# Mean absolute error of the median, in mg/kg, and the mean negative log density of the hidden concentrations.


# %%
def score(survey: Survey, log_mean: Tensor, log_sd: Tensor) -> tuple[float, float]:
    """Error and NLL of log-normal predictions [place] of cadmium where it is hidden."""
    hidden = torch.isnan(survey.seen[:, 0])
    truth = survey.metals[hidden, 0]
    nll = -torch.distributions.LogNormal(log_mean, log_sd).log_prob(truth).mean().item()
    return (log_mean.exp() - truth).abs().mean().item(), nll


def ridge(survey: Survey) -> tuple[Tensor, Tensor]:
    """Bayesian ridge regression of log cadmium on the logarithms of the other metals, without locations."""
    hidden = torch.isnan(survey.seen[:, 0]).numpy()
    others, cadmium = survey.seen[:, 1:].numpy(), survey.seen[:, 0].numpy()
    fitted = BayesianRidge().fit(others[~hidden], cadmium[~hidden])
    mean, sd = map(torch.as_tensor, fitted.predict(others[hidden], return_std=True))
    return survey.centre[0] + survey.scale[0] * mean, survey.scale[0] * sd


# %%
def grid(survey: Survey, num: int = 60) -> Tensor:
    """Places of a regular grid over the survey [num × num, 2], row by row."""
    low, high = survey.places.min(0).values, survey.places.max(0).values
    x, y = (torch.linspace(float(a), float(b), num, dtype=low.dtype) for a, b in zip(low, high, strict=True))
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)


def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500, help="steps of the fit")
    parser.add_argument("--out", type=Path, default=Path("out/soil"), help="folder for pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    start = time.perf_counter()

    survey = load()
    model, guide = train(survey, options.steps)
    predicted = model.predict(guide, survey.places, survey.seen, num_samples=300)
    hidden = torch.isnan(survey.seen[:, 0])
    log_mean = survey.centre[0] + survey.scale[0] * predicted.mean[hidden, 0]
    log_sd = survey.scale[0] * predicted.stddev[hidden, 0]
    rows = {"ridge on the other metals": score(survey, *ridge(survey)), "GP-VAE": score(survey, log_mean, log_sd)}
    print("\n| method | MAE [mg/kg] | NLL |\n|---|---:|---:|")
    for name, (mae, nll) in rows.items():
        print(f"| {name} | {mae:.3f} | {nll:.3f} |")

    places = grid(survey)
    mapped = model.predict(guide, survey.places, survey.seen, places, num_samples=2000)
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.6), layout="constrained")
    median = (survey.centre[0] + survey.scale[0] * mapped.mean[:, 0]).exp()
    shape, top = (60, 60), float(np.quantile(survey.metals[:, 0], 0.98))
    known = {"sites": survey.places[~hidden], "site_values": survey.metals[~hidden, 0]}
    plots.plot_field(places, median, grid=shape, **known, label="cadmium [mg/kg]", limits=(0.0, top), ax=axes[0])
    spread = (survey.scale[0] * mapped.stddev[:, 0]).exp()
    plots.plot_field(
        places, spread, grid=shape, sites=survey.places[~hidden], label="geometric standard deviation", ax=axes[1]
    )
    for ax, title in zip(
        axes, ("median, and measurements", "uncertainty at a new place, and where cadmium is known"), strict=True
    ):
        ax.set(xlabel="east [km]", ylabel="north [km]")
        ax.set_title(title, fontsize="medium")
    figure.savefig(options.out / "map.png", dpi=110)
    print(f"\nwrote map.png to {options.out} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
