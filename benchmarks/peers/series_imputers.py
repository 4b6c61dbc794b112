"""Predictions of the missing entries of a table over time by methods for single outputs: interpolation and processes."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.peers import imputers
from benchmarks.peers.table_imputers import Filled, Mask, Rows, by_points

Times = Float[Tensor, " N"]


def interpolation(t: Times, train: Rows, held_out: Mask, period: float | None) -> Filled:
    """Linear interpolation of each output over time."""

    def impute(train: Rows, rows: Rows) -> Rows:
        return imputers.linear_interpolation(t, rows, rows.isnan())[0]

    return by_points(impute, train, train, held_out)


def processes(t: Times, train: Rows, held_out: Mask, period: float | None) -> Filled:
    """A process for each output: Matérn-3⁄2, or Matérn-½ and daily for hourly data."""
    impute = imputers.smooth_processes if period is None else imputers.daily_processes
    mean, stddev = impute(t, train, train.isnan())
    assert stddev is not None
    return Filled(torch.zeros(len(t), 1).to(mean), mean[:, None], stddev[:, None])


PEERS: dict[str, Callable[[Times, Rows, Mask, float | None], Filled]] = {
    "linear interpolation": interpolation,
    "independent GPs": processes,
}
