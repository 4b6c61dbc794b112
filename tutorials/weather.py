# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---
"""A weather map from scattered stations: `python -m tutorials.weather [--steps N] [--out FOLDER]`."""

# %% [markdown]
# # A weather map from scattered stations
#
# Fifty stations in the mountains measure precipitation and the day's highest and lowest temperature, with gaps.  A sparse
# GP-VAE learns from the weeks of one year the correlation of weather over places, elevations, days and variables.  Then it
# fills gaps of another year: at stations without any observation, and between stations.

# %%
import argparse
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
from pyro_lvgp.infer import JointAdam, LRSchedule, StructuredELBO, fit
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import SparseGPVAE, cluster_centres
from pyro_lvgp.networks import FactorNet

TRAIN, TEST, WEEKS = 1996, 1997, 52
NUM_INDUCING, NUM_HIDDEN = 70, 5
MAXIMUM = 1  # of precipitation, maximum, minimum
LENGTHSCALE = torch.tensor([1.0, 1.0, 1.5, 3.0])  # [100 km], [100 km], [km of height], [days]


# %% [markdown]
# The data: a row is a station on a day of a week, at 100 km east and north, km of height, and day.  The effects of season
# and elevation are removed by a regression on the training year; precipitation is log(1 + mm).


# %%
class Weather(NamedTuple):
    """Two years in weeks.

    :param x: inputs of the rows of every week [rows, 4].
    :param y: standardised data by year [weeks, rows, 3].
    :param names: of stations.
    :param measured: highest temperature by year [weeks, rows], in °C.
    """

    x: torch.Tensor
    y: dict[int, torch.Tensor]
    names: list[str]
    measured: dict[int, torch.Tensor]
    coefficients: torch.Tensor
    scale: torch.Tensor

    def expected(self, x: torch.Tensor, week: int | torch.Tensor) -> torch.Tensor:
        """Effects of season and elevation, at inputs in a week."""
        return season(7.0 * torch.as_tensor(week) + 3.0 + x[..., 3], x[..., 2]) @ self.coefficients


def season(day: torch.Tensor, height: torch.Tensor) -> torch.Tensor:
    """Regressors: annual sine and cosine, elevation, and their products."""
    waves = [torch.ones_like(day), (2 * np.pi * day / 365.25).cos(), (2 * np.pi * day / 365.25).sin()]
    return torch.stack([*waves, *(wave * height for wave in waves)], -1)


def load() -> Weather:
    """Stations that measured temperature on most days."""
    data = load_dataset("weather_trentino")
    year_of = data["dates"].astype("datetime64[Y]").astype(int) + 1970
    kept = np.isfinite(data["Y"][year_of == TRAIN][..., MAXIMUM]).mean(0) > 0.5
    place = np.stack([data["lon"] * np.cos(np.deg2rad(46.0)) * 1.112, data["lat"] * 1.112, data["elev"] / 1000.0], -1)[kept]
    place[:, :2] -= place[:, :2].mean(0)
    place = torch.as_tensor(place)
    day = torch.arange(-3.0, 4.0).repeat_interleave(len(place))[:, None]
    x = torch.cat([place.repeat(7, 1), day], -1)
    raw = {}
    for year in (TRAIN, TEST):
        rows = torch.as_tensor(data["Y"][year_of == year][: 7 * WEEKS, kept], dtype=torch.float64)
        rows[..., 0] = rows[..., 0].log1p()
        raw[year] = rows.reshape(WEEKS, 7 * len(place), 3)
    features = season(7.0 * torch.arange(WEEKS)[:, None] + 3.0 + x[:, 3], x[:, 2].expand(WEEKS, -1))
    seen = [~torch.isnan(raw[TRAIN][..., d]) for d in range(3)]
    fits = [torch.linalg.lstsq(features[mask], raw[TRAIN][..., d][mask][:, None]).solution for d, mask in enumerate(seen)]
    coefficients = torch.cat(fits, -1)
    scale = (raw[TRAIN] - features @ coefficients).flatten(0, 1).square().nanmean(0).sqrt()
    y = {year: (rows - features @ coefficients) / scale for year, rows in raw.items()}
    measured = {year: rows[..., MAXIMUM] for year, rows in raw.items()}
    return Weather(x, y, data["location"][kept].tolist(), measured, coefficients, scale)


# %% [markdown]
# The model: a process over place, height and day for each variable, which a linear decoder may mix.  Weeks share kernels,
# decoder, encoder and inducing points, which k-means of the inputs places, in units of lengthscales.  Initially the encoder is
# the inverse of the decoder.


# %%
def train(weather: Weather, num_steps: int) -> tuple[SparseGPVAE, SparseStructuredGPGuide]:
    """Fit the weeks of the first year."""
    Z = cluster_centres(weather.x / LENGTHSCALE, NUM_INDUCING) * LENGTHSCALE
    decoder = nn.Linear(3, 3)
    nn.init.eye_(decoder.weight)
    nn.init.zeros_(decoder.bias)
    model = SparseGPVAE(
        Matern(4, nu=1.5, lengthscale=LENGTHSCALE, batch_shape=(3,)),
        decoder,
        Z,
        Gaussian(0.1, data_dim=3),
        num_data=WEEKS,
    ).double()
    encoder = FactorNet(3, 3, (20,), init_scale=0.3, loadings=decoder.weight)
    guide = SparseStructuredGPGuide(model, encoders={"u": encoder.double()})
    fit(
        lambda y, idx: model(weather.x, y, idx),  # all weeks have the same inputs
        lambda y, idx: guide(weather.x, y, idx),
        weather.y[TRAIN],
        loss=StructuredELBO(max_plate_nesting=2),
        num_steps=num_steps,
        batch_size=4,
        optim=JointAdam(lr=0.02),
        callbacks=[LRSchedule("cosine")],
    )
    return model, guide


# %% [markdown]
# The second year: some stations are hidden altogether.


# %%
def hide(weather: Weather) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of the second year without some stations, and the mask of their rows."""
    measuring = (~torch.isnan(weather.measured[TEST][:, : len(weather.names)])).any(0).nonzero()[:, 0]
    stations = measuring[torch.randperm(len(measuring), generator=torch.Generator().manual_seed(1))[:NUM_HIDDEN]]
    hidden = torch.zeros(len(weather.names), dtype=torch.bool)
    hidden[stations] = True
    hidden = hidden.repeat(7)
    return weather.y[TEST].masked_fill(hidden[:, None], torch.nan), hidden


def summarise(weather: Weather, mean: torch.Tensor, stddev: torch.Tensor, hidden: torch.Tensor) -> str:
    """Errors at each hidden station, in °C, and coverage of two standard deviations."""
    truth, expected = weather.measured[TEST], weather.expected(weather.x, torch.arange(WEEKS)[:, None])[..., MAXIMUM]
    lines = [
        "| station never seen | height [m] | season and height: RMSE [°C] | GP-VAE: RMSE [°C] | within 2 sd |",
        "|---|---:|---:|---:|---:|",
    ]
    for station in hidden[: len(weather.names)].nonzero().flatten().tolist():
        rows = slice(station, None, len(weather.names))
        before, after = (expected - truth)[:, rows], (mean - truth)[:, rows]
        inside = (after.abs() < 2 * stddev[:, rows])[~torch.isnan(after)].double().mean()
        lines.append(
            f"| {weather.names[station]} | {1000 * weather.x[station, 2]:.0f} | {before.square().nanmean().sqrt():.2f} | "
            f"{after.square().nanmean().sqrt():.2f} | {inside:.0%} |"
        )
    return "\n".join(lines)


# %% [markdown]
# The figures: a hidden station's year, and the map of one day, 500 m above the sea, from the observed stations.
# Circles are stations, squares the hidden ones, in the colour of their measurements, adjusted to 500 m by the regression.


# %%
def draw(weather: Weather, model, guide, visible, mean, stddev, hidden, out: Path) -> None:
    """Draw and save the figures."""
    station = int(hidden.nonzero()[0])
    rows = slice(station, None, len(weather.names))
    day, truth, middle, width = (
        part.flatten().numpy()
        for part in (
            7.0 * torch.arange(WEEKS)[:, None] + torch.arange(7.0),
            weather.measured[TEST][:, rows],
            mean[:, rows],
            stddev[:, rows],
        )
    )
    figure, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
    ax.fill_between(day, middle - 2 * width, middle + 2 * width, color="C0", alpha=0.25, lw=0, label="mean ± 2 sd")
    ax.plot(day, middle, color="C0", lw=1)
    ax.plot(day, truth, "k.", ms=3, label="measured, hidden")
    ax.set(xlabel=f"day of {TEST}", ylabel="highest temperature [°C]")
    ax.set_title(f"{weather.names[station].title()}, of which nothing was seen")
    ax.legend(loc="upper left")
    figure.savefig(out / "year.png", dpi=150)

    week, side = 26, 40
    now = (weather.x[:, 3] == 0.0) & ~torch.isnan(weather.measured[TEST][week])
    east, north = (torch.linspace(weather.x[:, i].min() - 0.05, weather.x[:, i].max() + 0.05, side) for i in (0, 1))
    grid = torch.cartesian_prod(north, east).flip(-1)
    x_new = torch.cat([grid, torch.tensor([0.5, 0.0]).expand(len(grid), -1)], -1)
    predicted = model.predict(guide, weather.x, visible[week : week + 1], x_new, num_samples=500)
    field = (weather.expected(x_new, week) + weather.scale * predicted.mean[0])[:, MAXIMUM].reshape(side, side)
    spread = (weather.scale * predicted.stddev[0])[:, MAXIMUM].reshape(side, side)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    low = weather.expected(x_new[:1].expand(int(now.sum()), -1), week)[:, MAXIMUM]
    actual = weather.expected(weather.x[now], week)[:, MAXIMUM]
    reduced = weather.measured[TEST][week][now] - actual + low  # to 500 m, by the regression
    both = torch.cat([field.flatten(), reduced])
    for ax, values, limits, title in (
        (axes[0], field, both.aminmax(), "highest temperature at 500 m [°C]"),
        (axes[1], spread, spread.aminmax(), "standard deviation [°C]"),
    ):
        colours = {"cmap": "viridis", "vmin": float(limits.min), "vmax": float(limits.max)}
        image = ax.pcolormesh((100 * east).numpy(), (100 * north).numpy(), values.numpy(), shading="gouraud", **colours)
        figure.colorbar(image, ax=ax)
        ax.set(xlabel="km east", title=title, aspect="equal")
        for chosen, marker in ((now & ~hidden, "o"), (now & hidden, "s")):
            fill = {"c": reduced[chosen[now]].numpy(), **colours} if ax is axes[0] else {"c": "white"}
            ax.scatter(*(100 * weather.x[chosen, :2]).T.numpy(), marker=marker, edgecolors="k", s=30, **fill)
    axes[0].set(ylabel="km north")
    figure.savefig(out / "map.png", dpi=150)


def main() -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of the fit")
    parser.add_argument("--out", type=Path, default=Path("out/weather"), help="folder for pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    weather = load()
    model, guide = train(weather, options.steps)
    visible, hidden = hide(weather)
    predicted = model.predict(guide, weather.x, visible, num_samples=50)
    expected = weather.expected(weather.x, torch.arange(WEEKS)[:, None])[..., MAXIMUM]
    mean, stddev = (weather.scale[MAXIMUM] * part[..., MAXIMUM] for part in (predicted.mean, predicted.stddev))
    mean = mean + expected
    print("\n" + summarise(weather, mean, stddev, hidden) + "\n")
    draw(weather, model, guide, visible, mean, stddev, hidden, options.out)
    print(f"wrote {', '.join(sorted(path.name for path in options.out.iterdir()))} to {options.out}")


if __name__ == "__main__":
    main()
