"""Random states that do not change the global random state."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.pyro_lock import pyro_lock


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed all draws within the context, on the CPU and every GPU in use, and restore the global random state afterwards.

    :param seed: seed; None to draw from the global random state.

    >>> state = torch.get_rng_state()
    >>> with seeded(0):
    ...     noise = torch.randn(3)
    >>> torch.equal(state, torch.get_rng_state())
    True
    """
    if seed is None:
        yield
        return
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise TypeError(f"expected seed to be an integer or None, got {seed!r}; use int(...)")
    with forked():
        seed_all(int(seed))
        yield


def seed_all(seed: int) -> None:
    """Seed the global random state, as ``torch.manual_seed`` does.

    In builds of PyTorch without accelerators, ``torch.manual_seed`` takes milliseconds to note the whole stack of calls for
    each kind of accelerator.

    :param seed: seed.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def forked() -> Iterator[None]:
    """Restore the global random state, of the CPU and every GPU in use, at the end of the context.

    Other threads cannot enter such a context before it ends.

    >>> with forked():
    ...     noise = torch.randn(3)
    >>> torch.equal(noise, torch.randn(3))
    True
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with pyro_lock, torch.random.fork_rng(devices=devices):
        yield


def normal_draws(*shape: int, seed: int, like: Tensor) -> Float[Tensor, "*shape"]:
    """Draw standard normal numbers that do not depend on the device or on torch's default device.

    :param shape: shape of the result.
    :param seed: seed of the draws.
    :param like: a tensor of the device and dtype of the result.

    >>> normal_draws(2, seed=0, like=torch.zeros((), dtype=torch.float64))
    tensor([ 1.5410, -0.2934], dtype=torch.float64)
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(like)
