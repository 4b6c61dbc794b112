"""Seeds that leave the global random state alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from a random state of one's own, on the CPU and every GPU in use; with None, from the global state.

    >>> state = torch.get_rng_state()
    >>> with seeded(0):
    ...     noise = torch.randn(3)
    >>> torch.equal(state, torch.get_rng_state())
    True
    """
    if seed is None:
        yield
        return
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
