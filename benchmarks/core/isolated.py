"""Isolated runs, between which neither parameters nor random states are shared."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded

T = TypeVar("T")


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Context with an empty parameter store and a seeded random state; restores both on exit."""
    with pyro.get_param_store().scope(), seeded(seed):
        yield


def timed(function: Callable[[], T], *, seed: int) -> tuple[T, float]:
    """Call a function in an isolated run, and return its result and wall seconds."""
    start = time.perf_counter()
    with isolated(seed):
        result = function()
    return result, time.perf_counter() - start


def wall_seconds(function: Callable[[], Any]) -> float:
    """Wall seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_step(svi: SVI, batches: Iterable[tuple[Tensor, ...]], num_untimed: int) -> float:
    """Return the median wall seconds of steps.

    :param svi: takes the steps.
    :param batches: arguments of each step.
    :param num_untimed: number of first steps that do not count.
    """
    return statistics.median([wall_seconds(partial(svi.step, *batch)) for batch in batches][num_untimed:])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context with a default dtype of torch; restores the former one on exit."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
