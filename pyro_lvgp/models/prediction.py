"""Predictive moments, averaged over draws."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """Predictive moments, entry by entry, in the units of the data.

    :param mean: mean of y.
    :param variance: variance of y, noise included.
    :param f_mean: mean of the function f under the likelihood.
    :param f_variance: variance of f.
    """

    mean: Float[Tensor, "B D"]
    variance: Float[Tensor, "B D"]
    f_mean: Float[Tensor, "B D"]
    f_variance: Float[Tensor, "B D"]

    @property
    def stddev(self) -> Float[Tensor, "B D"]:
        """Standard deviation of y."""
        return self.variance.sqrt()


def average(rows: Iterator[TorchDistributionMixin]) -> Prediction:
    """Moments of an equal mixture of rows."""
    y, f = _MixtureMoments(), _MixtureMoments()
    for row in rows:
        noisy = row.base_dist
        mean, variance = noisy.moments()
        y.add(mean.detach(), variance.detach())
        f.add(noisy.f_mean.detach(), noisy.f_variance.detach())
    return Prediction(y.mean, y.variance, f.mean, f.variance)


class _MixtureMoments:
    """Running mean, and by the law of total variance the variance, of an equal mixture (Welford's recursion)."""

    def __init__(self):
        self._count = 0
        self.mean = self._within = self._between = torch.zeros(())

    def add(self, mean: Tensor, variance: Tensor) -> None:
        self._count += 1
        step = mean - self.mean
        self.mean = self.mean + step / self._count
        self._between = self._between + step * (mean - self.mean)
        self._within = self._within + (variance - self._within) / self._count

    @property
    def variance(self) -> Tensor:
        return self._within + self._between / self._count
