"""Runs of their own: nothing of one fit reaches the next."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pyro

from pyro_lvgp._utils.seeding import seeded

T = TypeVar("T")


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """An empty param store, and a random state that starts at the seed; afterwards both are what they were."""
    with pyro.get_param_store().scope(), seeded(seed):
        yield


def timed(function: Callable[[], T], *, seed: int) -> tuple[T, float]:
    """What a function returns when it runs on its own, and after how many seconds."""
    start = time.perf_counter()
    with isolated(seed):
        result = function()
    return result, time.perf_counter() - start
