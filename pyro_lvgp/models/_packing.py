"""Observed entries of a table as a smaller table without most of the missing ones."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Packing(NamedTuple):
    """Observed entries of each column, moved to its first rows, so that missing entries take no time.

    :param source: indices of the rows of the observed entries of each column, and any others where it has fewer than R.
    :param target: where entries of each row are among these; any where missing.
    """

    observed: Bool[Tensor, "B D"]
    source: Int[Tensor, "R D"]
    target: Int[Tensor, "B D"]

    @classmethod
    def of(cls, observed: Bool[Tensor, "B D"]) -> "Packing":
        """Find the observed entries of each column."""
        B, D = observed.shape
        counted = observed.cumsum(0)
        number = max(int(counted[-1].max()), 1)
        rows = torch.arange(B, device=observed.device)[:, None].expand(B, D)
        target = torch.where(observed, counted - 1, number)
        source = target.new_zeros(number + 1, D).scatter_(0, target, rows)[:number]
        return cls(observed, source, target.clamp_max(number - 1))

    def pack(self, x: Float[Tensor, "*batch B #D"]) -> Float[Tensor, "*batch R D"]:
        """Take the observed entries of each column."""
        number, D = self.source.shape
        return x.expand(*x.shape[:-1], D).gather(-2, self.source.expand(*x.shape[:-2], number, D))

    def unpack(self, x: Float[Tensor, "R D"]) -> Float[Tensor, "B D"]:
        """Put entries back, with zeros for missing ones."""
        return torch.where(self.observed, x.gather(0, self.target), 0.0)
