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

    :param origin: the first date, in UTC if dates have a time zone.
    :param unit: ``"days"``, ``"hours"``, ``"minutes"`` or ``"seconds"``.
    :param has_zone: whether dates have a time zone, which may be another one for each index of dates.
    """

    origin: np.datetime64
    unit: str
    has_zone: bool

    @classmethod
    def of(cls, dates: Any) -> "TimeAxis":
        """Create the axis whose unit is the largest that the median step between dates holds.

        :param dates: a ``pandas.DatetimeIndex``.
        """
        days, rest = _days_and_rest(dates.unique().sort_values())
        steps = np.diff(days) / _UNITS["seconds"] + np.diff(rest) / _UNITS["seconds"]
        step = np.median(steps) if len(steps) else 0.0
        unit = next((name for name, length in _UNITS.items() if step >= length / _UNITS["seconds"]), "seconds")
        return cls(dates.min().to_datetime64(), unit, dates.tz is not None)

    def numbers(self, dates: Any) -> Float[Tensor, "N 1"]:
        """Convert dates.

        :param dates: a ``pandas.DatetimeIndex``.
        :raises ValueError: for dates with a time zone if those of the axis have none, or without if they have one.
        """
        if (dates.tz is not None) != self.has_zone:
            expected, got = ("with", "without") if self.has_zone else ("without", "with")
            advice = "dates.tz_localize(zone)" if self.has_zone else "dates.tz_localize(None)"
            raise ValueError(f"expected dates {expected} a time zone, as in fit, got dates {got}; pass {advice}")
        parts = zip(_days_and_rest(dates), _days_and_rest(self.origin), strict=True)
        elapsed = sum((part - of_origin) / _UNITS[self.unit] for part, of_origin in parts)
        return torch.tensor(elapsed, dtype=torch.float64)[:, None]

    def length(self, period: datetime.timedelta | np.timedelta64) -> float:
        """Convert a duration.

        :param period: the duration.
        """
        return float(np.timedelta64(period) / _UNITS[self.unit])


def _days_and_rest(dates: Any) -> tuple[Any, Any]:
    """Split dates, in UTC if they have a time zone, into the days and the time since midnight.

    Their differences do not overflow, as those of dates in nanoseconds do after 292 years.

    :param dates: a ``pandas.DatetimeIndex``, or a date of NumPy.
    """
    values = dates if isinstance(dates, np.datetime64) else dates.to_numpy(f"datetime64[{dates.unit}]")
    days = values.astype("datetime64[D]")
    return days, values - days


def as_dates(values: Any) -> Any:
    """Return dates as a ``pandas.DatetimeIndex``; None for anything else.

    :param values: an index or a series of dates or periods, or an array or a list of dates, with or without time.
    :raises ValueError: for dates that are missing.
    """
    if torch.is_tensor(values) or np.ndim(values) != 1:
        return None
    import pandas as pd  # takes half a second, which tensors need not wait for

    index = pd.Index(values)
    if isinstance(index, pd.PeriodIndex):
        index = index.to_timestamp()
    elif pd.api.types.infer_dtype(index) == "date":
        index = pd.DatetimeIndex(index)
    if not isinstance(index, pd.DatetimeIndex):
        return None
    if index.hasnans:
        raise ValueError(f"expected a date for each row, got {int(index.isna().sum())} missing ones; drop these rows")
    return index
