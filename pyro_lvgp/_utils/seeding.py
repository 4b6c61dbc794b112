"""Seeds that leave the global random state alone."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from jaxtyping import Float
from torch import Tensor


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


def normal_draws(*shape: int, seed: int, like: Tensor) -> Float[Tensor, "*shape"]:
    """Standard normal draws, the same on every device and whatever torch's default device is.

    :param shape: of the result.
    :param seed: of the draws.
    :param like: a tensor of the device and dtype of the result.

    >>> normal_draws(2, seed=0, like=torch.zeros((), dtype=torch.float64))
    tensor([ 1.5410, -0.2934], dtype=torch.float64)
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(like)
