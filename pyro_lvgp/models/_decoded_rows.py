"""Distribution of rows of y given the output of a decoder."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

__all__ = ["DecodedRows"]


class DecodedRows(dist.Independent):
    """Distribution ``p(y | f)`` of rows of independent entries, with the function values f that it is conditioned on.

    :param entries: p(y | f) of each entry, of batch shape ``[*batch, N, D]``.
    :param f: function values, which broadcast to ``[*batch, N, D]``.

    >>> f = torch.zeros(5, 3)
    >>> rows = DecodedRows(dist.Normal(f, 1.0), f).expand((4, 5))
    >>> rows.event_shape, rows.f.shape
    (torch.Size([3]), torch.Size([4, 5, 3]))
    """

    def __init__(self, entries: Any, f: Tensor):
        super().__init__(entries, 1)
        self.f = f.expand(entries.batch_shape)

    def expand(self, batch_shape, _instance=None):
        shape = torch.Size(batch_shape) + self.event_shape
        return DecodedRows(self.base_dist.expand(shape), self.f.expand(shape))
