"""Tables of the benchmark ``defaults``, and their split into training and test rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from sklearn import datasets
from torch import Tensor

from benchmarks.core.arrays import load_arrays, load_statsmodels

MAX_SHARE = 0.9  # columns in which one value has a larger share are left out


class Sizes(NamedTuple):
    """Largest numbers of training rows, new rows and columns of a sub-sample."""

    train: int
    test: int
    columns: int


SMALL, LARGE, QUICK = Sizes(250, 100, 15), Sizes(1500, 100, 60), Sizes(60, 10, 5)


class Task(NamedTuple):
    """Training rows, and rows whose hidden entries are to be predicted; columns are standardised by the training rows.

    :param train: training rows, NaN where hidden or missing.
    :param rows: rows to predict, NaN where hidden or missing; for hidden entries these are the training rows.
    :param truth: values of the rows, NaN where missing.
    :param hidden: mask of the entries to predict.
    :param t: times of the rows of a series, which are then the training rows.
    :param period: cycle of a series that the methods are told of.
    """

    train: Float[Tensor, "N D"]
    rows: Float[Tensor, "B D"]
    truth: Float[Tensor, "B D"]
    hidden: Bool[Tensor, "B D"]
    t: Float[Tensor, " N"] | None = None
    period: float | None = None


def _table(name: str, key: str) -> Callable[[], np.ndarray]:
    return lambda: load_arrays(name)[key]


def _motion() -> np.ndarray:
    return load_arrays("cmu35_walkjog")["Y"][:, 3:]  # without the position of the root


def weather_maxima() -> np.ndarray:
    """Daily maxima of temperatures at stations without long gaps."""
    maxima = load_arrays("weather_trentino")["Y"][-4000:, :, 1]
    return maxima[:, np.isnan(maxima).mean(0) < 0.3]


STATSMODELS = (
    "anes96",
    "ccard",
    "danish_data",
    "elnino",
    "fair",
    "fertility",
    "macrodata",
    "modechoice",
    "randhie",
    "star98",
    "statecrime",
)
SETS: dict[str, Callable[[], Any]] = {
    "oilflow": _table("oilflow", "X"),
    "digits": lambda: datasets.load_digits().data,
    "wine": lambda: datasets.load_wine().data,
    "breast cancer": lambda: datasets.load_breast_cancer().data,
    "diabetes": lambda: datasets.load_diabetes(scaled=False).data,
    "iris": lambda: datasets.load_iris().data,
    "wine_red": _table("wine_red", "X"),
    "wine_white": _table("wine_white", "X"),
    "jura": _table("jura", "Y"),
    "bridges": _table("bridges", "Y"),
    "montreal": _table("montreal", "Y"),
    "eeg": _table("eeg", "Y_all"),
    "eeg_trials": lambda: load_arrays("eeg_trials")["Y"].reshape(-1, 7),
    "cmu35_walkjog": _motion,
    "air_quality_uci": _table("air_quality_uci", "Y"),
    "weather_trentino": weather_maxima,
    "frey": _table("frey", "X"),
    "yale": _table("yale", "X"),
    "mnist": _table("mnist", "X_test"),
    **{name: partial(load_statsmodels, name) for name in STATSMODELS},
}
LARGE_SETS = ("digits", "breast cancer", "wine_white", "air_quality_uci")


def load_tasks(name: str, seed: int, sizes: Sizes = SMALL) -> dict[str, Task]:
    """Load a set, draw rows and columns, and hide entries: a fifth of the training rows', and half of each new row's.

    :param name: name in ``SETS``.
    :param seed: seed of the split.
    :param sizes: limits of the rows and columns that are drawn.
    """
    values = np.asarray(SETS[name](), dtype=np.float64)
    rng = np.random.default_rng(seed)
    values = values[rng.permutation(len(values))]
    values = values[~np.isnan(values).all(1)]
    num_test = min(sizes.test, len(values) // 4)
    values = values[: num_test + sizes.train]
    values = draw_columns(values, sizes.columns, rng)
    values = values[~np.isnan(values).all(1)]
    Y = torch.as_tensor(values)
    train, test = standardise(Y[num_test:], Y[:num_test])
    return {"hidden entries": _hidden_entries(train, rng), "new rows": _new_rows(train, test, rng)}


def draw_columns(values: Float[np.ndarray, "N D"], max_columns: int, rng: np.random.Generator) -> Float[np.ndarray, "N E"]:
    """Draw columns that vary and are seen in half of the rows, and add noise that makes their densities finite.

    Densities of columns with few distinct values have no finite bound; uniform noise of the width of the smallest distance
    between values is added to every column.
    """
    columns = [d for d in range(values.shape[1]) if _varies(values[:, d])]
    columns = sorted(rng.permutation(columns)[:max_columns])
    return np.stack([_without_ties(values[:, d], rng) for d in columns], 1)


def standardise(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Divide tables by the standard deviations of the columns of the first, after subtracting its means."""
    centre = train.nanmean(0)
    scale = (train - centre).square().nanmean(0).sqrt()
    return tuple((Y - centre) / scale for Y in (train, *others))


def _varies(column: np.ndarray) -> bool:
    seen = column[~np.isnan(column)]
    return len(seen) > 0.5 * len(column) and np.unique(seen, return_counts=True)[1].max() < MAX_SHARE * len(seen)


def _without_ties(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    gaps = np.diff(np.unique(column[~np.isnan(column)]))
    width = gaps[gaps > 1e-6 * np.nanstd(column)].min()
    return column + width * (rng.random(len(column)) - 0.5)


def _hidden_entries(train: Tensor, rng: np.random.Generator) -> Task:
    hidden = torch.as_tensor(rng.random(train.shape) < 0.2) & ~train.isnan()
    hidden[(hidden | train.isnan()).all(1)] = False
    rows = train.masked_fill(hidden, torch.nan)
    return Task(rows, rows, train, hidden)


def _new_rows(train: Tensor, test: Tensor, rng: np.random.Generator) -> Task:
    half = torch.as_tensor(rng.random(test.shape).argsort(1).argsort(1) < test.shape[1] // 2)
    hidden = half & ~test.isnan()
    hidden[(hidden | test.isnan()).all(1)] = False
    return Task(train, test.masked_fill(hidden, torch.nan), test, hidden)
