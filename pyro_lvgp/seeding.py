"""Seeds that leave the global random state alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

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
    with forked():
        torch.manual_seed(seed)
        yield


def forked() -> AbstractContextManager[None]:
    """Go on from the global random state, on the CPU and every GPU in use, and put it back afterwards.

    >>> with forked():
    ...     noise = torch.randn(3)
    >>> torch.equal(noise, torch.randn(3))
    True
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices=devices)
