"""Tables over time of the benchmark ``defaults``, and the blocks that are hidden in them."""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from benchmarks.core.arrays import load_statsmodels
from benchmarks.tasks import recordings
from benchmarks.tasks.defaults_data import QUICK, SMALL, Task, draw_columns, standardise, weather_maxima

MAX_ROWS, QUICK_ROWS = 500, 60
LONG_SHARE, SHORT_SHARE = 0.2, 0.05  # of the rows: blocks in single columns, and the block over all columns


class Series(NamedTuple):
    """Table over time.

    :param t: times, increasing.
    :param Y: values, NaN where missing.
    :param period: 24 for hourly data.
    """

    t: Float[Tensor, " N"]
    Y: Float[Tensor, "N D"]
    period: float | None = None


def _recorded(task: str, number: int = 0) -> Callable[[], Series]:
    """Series of a recording of the benchmark ``recordings``, without the entries that are hidden there."""

    def load() -> Series:
        _, recording = next(islice(recordings.TASKS[task](), number, None))
        return Series(recording.t, recording.Y, recording.period)

    return load


def _even(load: Callable[[], np.ndarray]) -> Callable[[], Series]:
    """Series of a table whose rows are one unit of time apart."""

    def series() -> Series:
        Y = torch.as_tensor(load()).double()
        return Series(torch.arange(len(Y)).double(), Y)

    return series


SERIES: dict[str, Callable[[], Series]] = {
    "eeg_trials 1": _recorded("eeg_trials", 0),
    "eeg_trials 2": _recorded("eeg_trials", 1),
    "eeg_trials 3": _recorded("eeg_trials", 2),
    "cmu35_walkjog": _recorded("motion"),
    "air_quality_uci": _recorded("air"),
    "weather_trentino": _even(weather_maxima),
    "danish_data": _even(lambda: load_statsmodels("danish_data")),
    "elnino": _even(lambda: load_statsmodels("elnino")),
    "macrodata": _even(lambda: load_statsmodels("macrodata")),
}


def load_series(name: str, seed: int, *, quick: bool = False) -> Task:
    """Load a table over time, draw consecutive rows and some columns, and hide blocks.

    :param name: name in ``SERIES``.
    :param seed: seed of the rows, columns and blocks, together with the name.
    :param quick: draw few rows and columns.
    """
    series, rng = SERIES[name](), np.random.default_rng([seed, *name.encode()])
    num_rows = min(len(series.t), QUICK_ROWS if quick else MAX_ROWS)
    start = int(rng.integers(len(series.t) - num_rows + 1))
    rows = slice(start, start + num_rows)
    Y = torch.as_tensor(draw_columns(series.Y[rows].numpy(), (QUICK if quick else SMALL).columns, rng))
    (Y,) = standardise(Y)
    hidden = hide_blocks(len(Y), Y.shape[1], rng) & ~Y.isnan()
    gaps = Y.masked_fill(hidden, torch.nan)
    return Task(gaps, gaps, Y, hidden, series.t[rows], series.period)


def hide_blocks(num_rows: int, num_columns: int, rng: np.random.Generator) -> Bool[Tensor, "N D"]:
    """Mask of a block of 20 % of the rows in each column of a fifth of them, and of a block of 5 % of the rows in all.

    Blocks are at random places, each column of the fifth has its own, and at least one column has one.
    """
    hidden = torch.zeros(num_rows, num_columns, dtype=torch.bool)
    for column in rng.permutation(num_columns)[: max(num_columns // 5, 1)]:
        hidden[_block(num_rows, LONG_SHARE, rng), int(column)] = True
    hidden[_block(num_rows, SHORT_SHARE, rng)] = True
    return hidden


def _block(num_rows: int, share: float, rng: np.random.Generator) -> slice:
    length = max(round(share * num_rows), 1)
    start = int(rng.integers(num_rows - length + 1))
    return slice(start, start + length)
