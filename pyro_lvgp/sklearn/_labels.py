"""Labels of rows and columns of data frames."""

from collections.abc import Sequence
from typing import Any

Labels = tuple[Any, Any]


def labels_of(values: Any) -> Labels:
    """Return the index and the columns of a data frame, None for what the data do not have.

    :param values: data of any kind.
    """
    index = values.index if hasattr(values, "iloc") else None
    return index, getattr(values, "columns", None)


def as_coords(dims: Sequence[str], labels: Labels) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Return coordinates of a :class:`~pyro_lvgp.models.Prediction` from the labels of rows and columns.

    :param dims: names of the dimensions of rows and of columns.
    :param labels: labels, None where there are none.
    """
    return {dim: ((dim,), values) for dim, values in zip(dims, labels, strict=True) if values is not None}
