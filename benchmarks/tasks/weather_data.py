"""Data of the weather benchmarks: days and weeks of temperatures in Trentino or Japan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """Stations, variables and years.

    :param read: function that loads the record.
    :param variables: columns of the record, by their names in GHCN-Daily.
    :param train_years: training years.
    :param unseen_years: test years.
    :param target: variable hidden on the middle day of three.
    """

    read: Callable[[], Dataset]
    variables: tuple[str, ...]
    train_years: tuple[int, ...]
    unseen_years: tuple[int, ...]
    target: str

    @property
    def seen(self) -> str:
        """Name of the training years."""
        return _period(self.train_years)

    @property
    def unseen(self) -> str:
        """Name of the test years."""
        return _period(self.unseen_years)

    def column(self, variable: str) -> int:
        """Index of the column of a variable."""
        return self.variables.index(variable)

    @property
    def temperatures(self) -> list[int]:
        """Columns hidden together in weeks."""
        return [column for column, name in enumerate(self.variables) if name.startswith("T")]


def _period(years: tuple[int, ...]) -> str:
    return " and ".join(map(str, years))


TRENTINO = Source(lambda: load_dataset("weather_trentino"), ("PRCP", "TMAX", "TMIN"), (1996, 1997), (1998,), "TMAX")
TRENTINO_1996 = replace(TRENTINO, train_years=(1996,))
_JAPANESE = ("PRCP", "TMAX", "TMIN", "TAVG", "SNWD")
JAPAN = Source(lambda: ghcn_daily("JA", [1980, 1981], _JAPANESE), _JAPANESE, (1980,), (1981,), "TAVG")


class Part(NamedTuple):
    """Groups of consecutive days of one or more years; a row of a group is a station on a day.

    :param truth: all measurements, precipitation and depth of snow as log(1 + mm).
    :param hidden: mask of the entries to predict.
    :param centre: mean by a regression on season and elevation.
    :param days: day of the year of each row.
    """

    truth: Float[Tensor, "B N D"]
    hidden: Bool[Tensor, "B N D"]
    centre: Float[Tensor, "B N D"]
    days: Float[Tensor, "B N"]


@dataclass(frozen=True)
class Weather:
    """Training years and test years, in groups of days.

    :param x: place [100 km east, 100 km north, km of elevation] and day of each row of every group.
    :param parts: parts of the data, by names of the years.
    :param scale: standard deviations of the residuals of the regression, in the units of ``truth``.
    :param days_per_group: days in a group.
    :param source: stations, variables and years.
    """

    x: Float[Tensor, "N 4"]
    parts: dict[str, Part]
    scale: Float[Tensor, " D"]
    days_per_group: int
    source: Source

    @property
    def train(self) -> Float[Tensor, "B N D"]:
        """Observed entries of the training years, standardised."""
        return self.data(self.source.seen)

    def data(self, name: str) -> Float[Tensor, "B N D"]:
        """Observed entries of a part of the data, standardised."""
        part = self.parts[name]
        return ((part.truth - part.centre) / self.scale).masked_fill(part.hidden, torch.nan)


def load(days_per_group: int, *, seed: int = 0, validation: Validation | None = None, source: Source = TRENTINO) -> Weather:
    """Groups of three days with a temperature of the middle day hidden, or of more days with a tenth of the rows hidden.

    Stations are those with a temperature on half of the days of the training years or more.  The effects of season
    and elevation are estimated by least squares from the observed entries of the training years, and removed for all methods.

    :param seed: seed of the hidden entries.
    :param source: stations and years.
    :param validation: use the training years alone, and hide other observed entries: the minima of the middle day of three;
        the maxima of the first or the last day, in half of the groups; or another tenth of the pairs of station and day.
    """
    data = source.read()
    dates, Y = data["dates"], data["Y"].astype(float).copy()
    amounts = [column for column in range(Y.shape[-1]) if column not in source.temperatures]
    Y[..., amounts] = np.log1p(Y[..., amounts])
    year_of = dates.astype("datetime64[Y]").astype(int) + 1970
    selected = np.isfinite(Y[np.isin(year_of, source.train_years)][..., source.column("TMAX")]).mean(0) >= 0.5
    selected &= np.isfinite(data["elev"])
    shrink = np.cos(np.deg2rad(data["lat"].mean().round()))
    place = np.stack([data["lon"] * shrink, data["lat"]], -1)[selected] * KM_PER_DEGREE / 100.0
    place = np.concatenate([place - place.mean(0), data["elev"][selected, None] / 1000.0], -1)
    generator = np.random.default_rng(seed)
    S, parts, elevation = int(selected.sum()), {}, torch.as_tensor(place[:, 2])
    groups = 365 // days_per_group
    for years in (source.train_years,) if validation else (source.train_years, source.unseen_years):
        days = np.concatenate([Y[year_of == year][: groups * days_per_group, selected] for year in years])
        truth = days.reshape(-1, days_per_group, S, days.shape[-1])
        hidden = _hide(truth.shape, None, generator, source)
        if validation:
            truth[hidden] = np.nan
            hidden = _hide(truth.shape, validation, generator, source)
        day = torch.arange(groups * days_per_group).double().reshape(groups, -1).repeat_interleave(S, -1)
        rows = [torch.as_tensor(part.reshape(len(truth), days_per_group * S, -1)) for part in (truth, hidden)]
        parts[_period(years)] = Part(rows[0], rows[1], torch.zeros_like(rows[0]), day.repeat(len(years), 1))
    elevation = elevation.repeat(days_per_group)
    train = parts[source.seen]
    coefficients = _regress(train, elevation)
    parts = {name: part._replace(centre=_season(part.days, elevation) @ coefficients) for name, part in parts.items()}
    left = (train.truth - parts[source.seen].centre).masked_fill(train.hidden, torch.nan).flatten(0, 1)
    day = torch.arange(days_per_group).double().repeat_interleave(S)[:, None]
    x = torch.cat([torch.as_tensor(place).repeat(days_per_group, 1), day - day.mean()], -1)
    return Weather(x, parts, left.square().nanmean(0).sqrt(), days_per_group, source)


def _hide(shape: tuple[int, ...], validation: Validation | None, generator: np.random.Generator, source: Source) -> np.ndarray:
    """Mask of the entries to predict [groups, days, stations, D]."""
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
    """Regressors: annual sine and cosine, elevation, and their products."""
    angle = 2.0 * np.pi * days / 365.25
    waves = [torch.ones_like(days), angle.cos(), angle.sin()]
    return torch.stack([*waves, *(wave * elevation for wave in waves)], -1)


def _regress(part: Part, elevation: Tensor) -> Float[Tensor, "features 3"]:
    features, columns = _season(part.days, elevation), []
    for d in range(part.truth.shape[-1]):
        seen = ~(part.hidden | torch.isnan(part.truth))[..., d]
        columns.append(torch.linalg.lstsq(features[seen], part.truth[..., d][seen][:, None]).solution)
    return torch.cat(columns, -1)
