"""What is said about data not seen: predictions as mixtures over posterior draws, and data filled in."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor


@dataclass(frozen=True)
class MixturePrediction:
    """An equal mixture of the entries' distributions at draws of the latents, in the units of the data.

    :param parts: distributions of the entries, of batch shape ``[draws, *series, N, D]``.

    >>> import pyro.distributions as dist
    >>> y = MixturePrediction((dist.Normal(torch.tensor([[[-1.0]], [[1.0]]]), 1.0),))
    >>> y.mean, y.variance
    (tensor([[0.]]), tensor([[2.]]))
    """

    parts: tuple[TorchDistributionMixin, ...]

    @classmethod
    def pool(cls, predictions: Iterable["MixturePrediction"]) -> "MixturePrediction":
        """The equal mixture of several predictions of the same data, such as those of fits with different seeds.

        Fits end in different optima.  By Jensen's inequality the log density of their mixture is never below the mean of
        theirs.

        :param predictions: of as many draws each.
        :raises ValueError: if there are none, or one has another shape or number of draws.

        >>> import pyro.distributions as dist
        >>> runs = [MixturePrediction((dist.Normal(torch.full((1, 1, 1), loc), 1.0),)) for loc in (-1.0, 1.0)]
        >>> MixturePrediction.pool(runs).variance
        tensor([[2.]])

        Source: Lakshminarayanan et al. (2017), "Simple and scalable predictive uncertainty estimation using deep ensembles".
        """
        predictions = tuple(predictions)
        shapes = {(sum(part.batch_shape[0] for part in each.parts), *each.parts[0].batch_shape[1:]) for each in predictions}
        if len(shapes) != 1:
            raise ValueError(f"expected predictions of one shape [draws, *series, N, D], got {sorted(shapes)}")
        return cls(tuple(part for each in predictions for part in each.parts))

    @cached_property
    def mean(self) -> Float[Tensor, "*series N D"]:
        """Mean of y."""
        return torch.cat([part.mean for part in self.parts]).mean(0)

    @cached_property
    def variance(self) -> Float[Tensor, "*series N D"]:
        """Variance of y, noise included, by the law of total variance."""
        means = torch.cat([part.mean for part in self.parts])
        return torch.cat([part.variance for part in self.parts]).mean(0) + means.var(0, correction=0)

    @property
    def stddev(self) -> Float[Tensor, "*series N D"]:
        """Standard deviation of y."""
        return self.variance.sqrt()

    def log_prob(self, y: Float[Tensor, "*series N D"]) -> Float[Tensor, "*series N D"]:
        """Log density of the mixture, entry by entry; NaN where y is.

        Source: eq. 3.10 of the GP-VAE thesis.
        """
        missing = torch.isnan(y)
        log_prob = torch.cat([part.log_prob(torch.nan_to_num(y)) for part in self.parts])
        return (log_prob.logsumexp(0) - math.log(len(log_prob))).masked_fill(missing, torch.nan)

    def sample(self) -> Float[Tensor, "draws *series N D"]:
        """One draw of y for each draw of the latents."""
        return torch.cat([part.sample() for part in self.parts])

    def quantile(self, q: float) -> Float[Tensor, "*series N D"]:
        """Quantile of y, from its draws.

        :param q: probability between 0 and 1.
        """
        return self.sample().quantile(q, 0)


class Imputation(NamedTuple):
    """Data whose missing entries have been filled.

    :param mean: data where observed, predictive mean where missing.
    :param variance: zero where observed, predictive variance where missing.
    """

    mean: Float[Tensor, "*series N D"]
    variance: Float[Tensor, "*series N D"]
