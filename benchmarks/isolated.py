"""Runs of their own: nothing of one fit reaches the next."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyro

from pyro_lvgp.seeding import seeded


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """An empty param store, and a random state that starts at the seed; afterwards both are what they were."""
    with pyro.get_param_store().scope(), seeded(seed):
        yield
