"""Annealing schedules: inverse temperatures of the bridging densities."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["fixed_schedule", "increasing_schedule", "power_schedule", "sigmoid_schedule"]

AnnealingSchedule = Literal["learned", "linear", "sigmoid"] | float


def increasing_schedule(increments: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
    """Compute inverse temperatures β_1 < … < β_K = 1 with steps proportional to the increments.

    :param increments: positive numbers.

    >>> increasing_schedule(torch.tensor([1.0, 1.0, 2.0]))
    tensor([0.2500, 0.5000, 1.0000])
    """
    beta = increments.cumsum(-1)
    # β_K must be exactly 1, without rounding: the last bridge is the target.
    return torch.cat([beta[:-1] / beta[-1:], torch.ones_like(beta[-1:])])


def power_schedule(num_steps: int, power: float) -> Float[Tensor, " K"]:
    """Compute inverse temperatures ``β_k = (k / K)^power``.

    :param num_steps: number of transitions K.
    :param power: 1 is linear; above 1, more of the steps are near the base.

    >>> power_schedule(2, 2.0)
    tensor([0.2500, 1.0000])
    """
    return torch.linspace(1.0 / num_steps, 1.0, num_steps) ** power


def sigmoid_schedule(num_steps: int, sharpness: float = 4.0) -> Float[Tensor, " K"]:
    """Compute inverse temperatures ``β_k = (σ(δ(2k/K − 1)) − σ(−δ)) / (σ(δ) − σ(−δ))``, with β_0 = 0 and β_K = 1.

    :param num_steps: number of transitions K.
    :param sharpness: δ; the larger, the more of the steps are near the base and near the target.

    Source: Grosse et al. (2015), "Sandwiching the marginal likelihood using bidirectional Monte Carlo".

    >>> sigmoid_schedule(2)
    tensor([0.5000, 1.0000])
    """
    grid = torch.sigmoid(sharpness * torch.linspace(-1.0, 1.0, num_steps + 1))
    return increasing_schedule(grid.diff())


def fixed_schedule(schedule: AnnealingSchedule, num_steps: int) -> Float[Tensor, " K"] | None:
    """Return the inverse temperatures β_1 … β_K of a schedule; None if they are learned.

    :param schedule: ``"linear"``, ``"sigmoid"``, the power of :func:`power_schedule`, or ``"learned"``.
    :param num_steps: number of transitions K.
    :raises ValueError: for any other schedule.

    >>> fixed_schedule("linear", 4)
    tensor([0.2500, 0.5000, 0.7500, 1.0000])
    """
    if schedule == "learned":
        return None
    if schedule == "linear":
        return power_schedule(num_steps, 1.0)
    if schedule == "sigmoid":
        return sigmoid_schedule(num_steps)
    if isinstance(schedule, float | int) and not isinstance(schedule, bool) and 0.0 < schedule < math.inf:
        return power_schedule(num_steps, float(schedule))
    raise ValueError(f'expected schedule "learned", "linear", "sigmoid" or a positive power, got {schedule!r}')
