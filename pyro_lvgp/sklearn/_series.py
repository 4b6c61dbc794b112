"""Dates as inputs of series."""

import datetime
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_UNITS = {
    "days": np.timedelta64(1, "D"),
    "hours": np.timedelta64(1, "h"),
    "minutes": np.timedelta64(1, "m"),
    "seconds": np.timedelta64(1, "s"),
}


class TimeAxis(NamedTuple):
    """Dates as numbers: time since an origin, in a unit.

    :param origin: the first date.
    :param unit: ``"days"``, ``"hours"``, ``"minutes"`` or ``"seconds"``.
    """

    origin: np.datetime64
    unit: str

    @classmethod
    def of(cls, dates: Any) -> "TimeAxis":
        """Create the axis whose unit is the largest that the median step between dates holds.

        :param dates: a ``pandas.DatetimeIndex`` without time zone.
        """
        steps = np.diff(np.sort(np.unique(dates.to_numpy("datetime64[ns]"))))
        step = np.median(steps) if len(steps) else np.timedelta64(0, "ns")
        unit = next((name for name, length in _UNITS.items() if step >= length), "seconds")
        return cls(dates.min().to_datetime64(), unit)

    def numbers(self, dates: Any) -> Float[Tensor, "N 1"]:
        """Convert dates.

        :param dates: a ``pandas.DatetimeIndex`` without time zone.
        """
        elapsed = (dates.to_numpy("datetime64[ns]") - self.origin) / _UNITS[self.unit]
        return torch.tensor(elapsed, dtype=torch.float64)[:, None]

    def length(self, period: datetime.timedelta | np.timedelta64) -> float:
        """Convert a duration.

        :param period: the duration.
        """
        return float(np.timedelta64(period) / _UNITS[self.unit])


def as_dates(values: Any) -> Any:
    """Return dates as a ``pandas.DatetimeIndex`` in UTC without time zone; None for anything else.

    :param values: an index or a series of dates or periods, or an array or a list of dates.
    :raises ValueError: for dates that are missing.
    """
    if torch.is_tensor(values) or np.ndim(values) != 1:
        return None
    import pandas as pd  # takes half a second, which tensors need not wait for

    index = pd.Index(values)
    if isinstance(index, pd.PeriodIndex):
        index = index.to_timestamp()
    if not isinstance(index, pd.DatetimeIndex):
        return None
    if index.hasnans:
        raise ValueError(f"expected a date for each row, got {int(index.isna().sum())} missing ones; drop these rows")
    return index if index.tz is None else index.tz_convert("UTC").tz_localize(None)
