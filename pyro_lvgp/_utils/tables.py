"""Conversion of tables of numbers to tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_matrix(values: Any) -> Tensor:
    """Return numbers as a tensor of double precision, NaN where missing.

    :param values: tensor, array, nested list, series or data frame, also with missing values of pandas.
    :raises ValueError: for values that are not numbers.
    """
    if torch.is_tensor(values):
        return values.double()
    try:
        if hasattr(values, "to_numpy") and hasattr(values, "isna"):
            return torch.tensor(values.to_numpy(dtype=np.float64, na_value=np.nan))
        return torch.tensor(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected numbers, got {_described(values)}; drop columns of text, and pass dates as the inputs X"
        ) from error


def index_of(values: Any) -> Any:
    """Return the index of a data frame or a series; None for other values.

    :param values: a table.
    """
    return values.index if hasattr(values, "reindex") else None


def _described(values: Any) -> str:
    if hasattr(values, "select_dtypes"):
        return f"columns {values.select_dtypes(exclude=['number', 'bool']).columns.tolist()} of other types"
    return f"values of type {getattr(values, 'dtype', type(values).__name__)}"
