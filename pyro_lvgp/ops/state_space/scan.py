"""Parallel prefix scan: all states of a recursion in a logarithmic number of steps."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Maps", "prefix"]

Maps: TypeAlias = tuple[Tensor, ...]  # parameters of N maps, each [*batch, N, a, b]


def prefix(
    maps: Maps,
    start: Float[Tensor, "*_ 1 a b"],
    compose: Callable[[Maps, Maps], Maps],
    apply: Callable[[Maps, Tensor], Tensor],
) -> Float[Tensor, "*batch N a b"]:
    r"""Compute the states ``x_n = map_n(x_{n−1})``, n = 1 … N, in O(N) work and O(log N) steps.

    Neighbouring maps are composed in pairs, whose states are computed by recursion.  Each other state follows from the state
    before it.

    :param maps: parameters of the maps.
    :param start: initial state x_0.
    :param compose: function of ``(first, second)`` that returns the parameters of second ∘ first.
    :param apply: function of maps and states that returns the next states.

    Source: Blelloch (1990), "Prefix sums and their applications"; Särkkä and García-Fernández (2021), "Temporal
    parallelization of Bayesian smoothers".

    >>> steps = (torch.arange(1.0, 6.0).reshape(5, 1, 1),)
    >>> add = lambda first, second: (first[0] + second[0],)
    >>> prefix(steps, torch.zeros(1, 1, 1), add, lambda steps, x: steps[0] + x).flatten()
    tensor([ 1.,  3.,  6., 10., 15.])
    """
    num = maps[0].shape[-3]
    if num == 0:
        return start[..., :0, :, :]
    if num == 1:
        return apply(maps, start)
    first, second = (tuple(part[..., n::2, :, :] for part in maps) for n in (0, 1))
    pairs = compose(tuple(part[..., : num // 2, :, :] for part in first), second)
    even = prefix(pairs, start, compose, apply)
    previous = torch.cat([start.expand(*even.shape[:-3], *start.shape[-3:]), even], -3)
    odd = apply(first, previous[..., : (num + 1) // 2, :, :])
    interleaved = torch.stack([odd[..., : num // 2, :, :], even], -3).flatten(-4, -3)
    return torch.cat([interleaved, odd[..., num // 2 :, :, :]], -3)
