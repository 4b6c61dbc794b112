"""Isolated runs, between which neither parameters nor random states are shared."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pyro

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
