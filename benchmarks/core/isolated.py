"""Isolated runs, between which neither parameters nor random states are shared."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pyro
import torch

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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context with a default dtype of torch; restores the former one on exit."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
