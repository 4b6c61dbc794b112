"""Levels of a category in a column of the inputs."""

import torch
from jaxtyping import Int
from torch import Tensor

from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp.kernels.base import Kernel

__all__ = ["read_levels"]


def read_levels(X: Tensor, num_levels: int | None, kernel: Kernel) -> Int[Tensor, "*batch N"]:
    """Convert a column of levels to integers.

    :param X: points ``[*batch, N, 1]`` with the column of levels alone.
    :param num_levels: number L of levels 0 … L − 1; None for any integers.
    :param kernel: the kernel, for the error.
    :raises ValueError: for numbers that are no integers, levels out of range, and numbers that are too large for the dtype to
        represent all integers around them.
    """
    column = X.squeeze(-1)
    largest = 2.0 / torch.finfo(column.dtype).eps  # from here on integers have no floating-point number of their own
    lower, upper = (-largest, largest) if num_levels is None else (-1.0, float(num_levels))
    valid = (column == column.round()) & (column > lower) & (column < upper)
    if not holds(valid.all()):
        got = column[~valid].flatten()[0].item()
        if num_levels is None:
            among, advice = f"of less than {largest:.0f} in size", "number the levels from 0, as pandas.factorize does"
        else:
            among, advice = f"from 0 to {num_levels - 1}", "number the levels so, or give the kernel more num_levels"
        raise ValueError(
            f"expected levels of {type(kernel).__name__} as integers {among} in column {kernel.level_columns[0]} of the "
            f"inputs, got {got:g}; {advice}, and take inducing points from the rows of the data."
        )
    return column.long()
