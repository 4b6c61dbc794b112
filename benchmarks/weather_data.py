"""Days and weeks of the weather in Trentino, or in Japan, with temperatures to predict."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp.datasets import Dataset, ghcn_daily, load_dataset

KM_PER_DEGREE = 111.2

Validation = Literal["minima", "maxima", "pairs"]


@dataclass(frozen=True)
class Source:
    """Stations, what they measure and which years of it.

    :param read: loads the record.
    :param variables: its columns, by their names in GHCN-Daily.
    :param train_year: to train on.
    :param unseen_year: to predict only.
    :param target: hidden on the middle one of three days.
    """

    read: Callable[[], Dataset]
    variables: tuple[str, ...]
    train_year: int
    unseen_year: int
    target: str

    def column(self, variable: str) -> int:
        """Which column a variable is."""
        return self.variables.index(variable)

    @property
    def temperatures(self) -> list[int]:
        """Columns hidden together in weeks."""
        return [column for column, name in enumerate(self.variables) if name.startswith("T")]


# The scores of 1997 were looked at while the benchmark was written.
TRENTINO = Source(lambda: load_dataset("weather_trentino"), ("PRCP", "TMAX", "TMIN"), 1996, 1998, "TMAX")
_JAPANESE = ("PRCP", "TMAX", "TMIN", "TAVG", "SNWD")
JAPAN = Source(lambda: ghcn_daily("JA", [1980, 1981], _JAPANESE), _JAPANESE, 1980, 1981, "TAVG")


class Year(NamedTuple):
    """Groups of consecutive days of a year; a row of a group is a station on a day.

    :param truth: all that was measured, precipitation and depth of snow as log(1 + mm).
    :param hidden: what is to be predicted.
    :param centre: what a regression on season and elevation expects.
    :param days: day of the year of each row.
    """

    truth: Float[Tensor, "B N D"]
    hidden: Bool[Tensor, "B N D"]
    centre: Float[Tensor, "B N D"]
    days: Float[Tensor, "B N"]


@dataclass(frozen=True)
class Weather:
    """A year to train on and one never seen, in groups.

    :param x: place [100 km east, 100 km north, km of elevation] and day of each row of every group.
    :param years: by name of the year.
    :param scale: standard deviations of what the regression leaves, in the units of ``truth``.
    :param days_per_group: days in a group.
    :param source: where they come from.
    """

    x: Float[Tensor, "N 4"]
    years: dict[int, Year]
    scale: Float[Tensor, " D"]
    days_per_group: int
    source: Source

    def data(self, year: int) -> Float[Tensor, "B N D"]:
        """What methods may see of a year, standardised."""
        part = self.years[year]
        return ((part.truth - part.centre) / self.scale).masked_fill(part.hidden, torch.nan)


def load(days_per_group: int, *, seed: int = 0, validation: Validation | None = None, source: Source = TRENTINO) -> Weather:
    """Groups of three days, a temperature of the middle one hidden; or longer ones, all those of a tenth of all rows hidden.

    Stations are those with a temperature on half of the days of the training year or more.  What season and elevation
    explain is found by least squares from what is left of the training year, and removed for all methods alike.

    :param seed: of what is hidden.
    :param source: stations and years.
    :param validation: the training year alone, and other entries to predict instead, of what is left of it: the minima of the
        middle day of three; the maxima of the first or of the last, in half of the groups; or another tenth of the pairs.
    """
    data = source.read()
    dates, Y = data["dates"], data["Y"].astype(float).copy()
    amounts = [column for column in range(Y.shape[-1]) if column not in source.temperatures]
    Y[..., amounts] = np.log1p(Y[..., amounts])
    year_of = dates.astype("datetime64[Y]").astype(int) + 1970
    kept = np.isfinite(Y[year_of == source.train_year][..., source.column("TMAX")]).mean(0) >= 0.5
    kept &= np.isfinite(data["elev"])
    shrink = np.cos(np.deg2rad(data["lat"].mean().round()))
    place = np.stack([data["lon"] * shrink, data["lat"]], -1)[kept] * KM_PER_DEGREE / 100.0
    place = np.concatenate([place - place.mean(0), data["elev"][kept, None] / 1000.0], -1)
    generator = np.random.default_rng(seed)
    S, years, elevation = int(kept.sum()), {}, torch.as_tensor(place[:, 2])
    for year in (source.train_year,) if validation else (source.train_year, source.unseen_year):
        groups = 365 // days_per_group
        truth = Y[year_of == year][: groups * days_per_group, kept].reshape(groups, days_per_group, S, -1)
        hidden = _hide(truth.shape, None, generator, source)
        if validation:
            truth[hidden] = np.nan
            hidden = _hide(truth.shape, validation, generator, source)
        day = torch.arange(groups * days_per_group).double().reshape(groups, -1).repeat_interleave(S, -1)
        rows = [torch.as_tensor(part.reshape(groups, days_per_group * S, -1)) for part in (truth, hidden)]
        years[year] = Year(rows[0], rows[1], torch.zeros_like(rows[0]), day)
    elevation = elevation.repeat(days_per_group)
    train = years[source.train_year]
    coefficients = _regress(train, elevation)
    years = {name: year._replace(centre=_season(year.days, elevation) @ coefficients) for name, year in years.items()}
    left = (train.truth - years[source.train_year].centre).masked_fill(train.hidden, torch.nan).flatten(0, 1)
    day = torch.arange(days_per_group).double().repeat_interleave(S)[:, None]
    x = torch.cat([torch.as_tensor(place).repeat(days_per_group, 1), day - day.mean()], -1)
    return Weather(x, years, left.square().nanmean(0).sqrt(), days_per_group, source)


def _hide(shape: tuple[int, ...], validation: Validation | None, generator: np.random.Generator, source: Source) -> np.ndarray:
    """What to predict [groups, days, stations, D]."""
    hidden = np.zeros(shape, bool)
    if shape[1] > 3:
        hidden[..., source.temperatures] = (generator.random(shape[:-1]) < 0.1)[..., None]
    elif validation == "maxima":
        groups = generator.permutation(shape[0])[: shape[0] // 2]
        hidden[groups, generator.choice([0, 2], len(groups)), :, source.column("TMAX")] = True
    else:
        hidden[:, 1, :, source.column("TMIN" if validation else source.target)] = True
    return hidden


def _season(days: Tensor, elevation: Tensor) -> Float[Tensor, "B N features"]:
    """A wave over the year, elevation, and how elevation matters through the year."""
    angle = 2.0 * np.pi * days / 365.25
    waves = [torch.ones_like(days), angle.cos(), angle.sin()]
    return torch.stack([*waves, *(wave * elevation for wave in waves)], -1)


def _regress(year: Year, elevation: Tensor) -> Float[Tensor, "features 3"]:
    features, columns = _season(year.days, elevation), []
    for d in range(year.truth.shape[-1]):
        seen = ~(year.hidden | torch.isnan(year.truth))[..., d]
        columns.append(torch.linalg.lstsq(features[seen], year.truth[..., d][seen][:, None]).solution)
    return torch.cat(columns, -1)
