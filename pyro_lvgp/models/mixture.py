"""What is said about data not seen: predictions as mixtures over posterior draws, and data filled in."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor


@dataclass(frozen=True)
class MixturePrediction:
    """A mixture of the entries' distributions at draws of the latents, in the units of the data.

    :param parts: distributions of the entries, of batch shape ``[draws, *series, N, D]``.
    :param weights: of the draws of all parts, which sum to one; equal ones if None.

    >>> import pyro.distributions as dist
    >>> y = MixturePrediction((dist.Normal(torch.tensor([[[-1.0]], [[1.0]]]), 1.0),))
    >>> y.mean, y.variance
    (tensor([[0.]]), tensor([[2.]]))
    """

    parts: tuple[TorchDistributionMixin, ...]
    weights: Float[Tensor, " draws"] | None = None

    @classmethod
    def pool(
        cls, predictions: Iterable["MixturePrediction"], weights: Iterable[float] | Tensor | None = None
    ) -> "MixturePrediction":
        """The mixture of several predictions of the same data, such as those of fits with different seeds.

        Fits end in different optima.  By Jensen's inequality the log density of their equal mixture is never below the mean
        of theirs.

        :param predictions: of as many draws each.
        :param weights: one for each prediction, from zero up, in units of their sum, such as the values of
            :func:`~pyro_lvgp.diagnostics.stacking_weights`; equal ones if None.
        :raises ValueError: if there are none, one has another shape or number of draws, or the weights do not fit.
        :raises TypeError: for weights by name.

        >>> import pyro.distributions as dist
        >>> runs = [MixturePrediction((dist.Normal(torch.full((1, 1, 1), loc), 1.0),)) for loc in (-1.0, 1.0)]
        >>> MixturePrediction.pool(runs).variance
        tensor([[2.]])

        Source: Lakshminarayanan et al. (2017), "Simple and scalable predictive uncertainty estimation using deep ensembles".
        """
        if isinstance(weights, Mapping):
            raise TypeError(
                f"expected weights in the order of the predictions, got them by the names {list(weights)}; pass "
                "weights.values() if that is the order"
            )
        predictions = tuple(predictions)
        shapes = {(sum(part.batch_shape[0] for part in each.parts), *each.parts[0].batch_shape[1:]) for each in predictions}
        if len(shapes) != 1:
            raise ValueError(f"expected predictions of one shape [draws, *series, N, D], got {sorted(shapes)}")
        parts = tuple(part for each in predictions for part in each.parts)
        if weights is None and all(each.weights is None for each in predictions):
            return cls(parts)
        if not torch.is_tensor(weights):
            weights = [1.0] * len(predictions) if weights is None else list(weights)
        shares = torch.as_tensor(weights)
        if shares.shape != (len(predictions),) or not (shares >= 0.0).all() or not shares.sum() > 0.0:
            raise ValueError(f"expected {len(predictions)} weights from zero up, one or more of them positive, got {weights}")
        ((draws, *_),) = shapes
        ones = [torch.full((draws,), 1.0 / draws) if each.weights is None else each.weights for each in predictions]
        return cls(parts, torch.cat([share * one for share, one in zip(shares / shares.sum(), ones, strict=True)]))

    @cached_property
    def mean(self) -> Float[Tensor, "*series N D"]:
        """Mean of y."""
        return self._average(torch.cat([part.mean for part in self.parts]))

    @cached_property
    def variance(self) -> Float[Tensor, "*series N D"]:
        """Variance of y, noise included, by the law of total variance."""
        means = torch.cat([part.mean for part in self.parts])
        return self._average(torch.cat([part.variance for part in self.parts]) + (means - self.mean).square())

    @property
    def stddev(self) -> Float[Tensor, "*series N D"]:
        """Standard deviation of y."""
        return self.variance.sqrt()

    def log_prob(self, y: Float[Tensor, "*series N D"]) -> Float[Tensor, "*series N D"]:
        """Log density of the mixture, entry by entry; NaN where y is.

        :param y: where.
        :raises ValueError: if y has another shape than the entries.

        Source: eq. 3.10 of the GP-VAE thesis.
        """
        if y.shape != (expected := self.parts[0].batch_shape[1:]):
            raise ValueError(
                f"expected y of shape {list(expected)}, as the entries predicted, got {list(y.shape)}; expand or index y to it"
            )
        missing = torch.isnan(y)
        # In the place of what is missing stands what every support has: 0 of counts, else the mean.
        log_prob = torch.cat(
            [p.log_prob(torch.where(missing, 0.0 if p.support.is_discrete else p.mean, y)) for p in self.parts]
        )
        if self.weights is None:
            return (log_prob.logsumexp(0) - math.log(len(log_prob))).masked_fill(missing, torch.nan)
        log_weights = self.weights.to(log_prob).log().reshape(-1, *[1] * y.dim())
        return (log_weights + log_prob).logsumexp(0).masked_fill(missing, torch.nan)

    def sample(self) -> Float[Tensor, "draws *series N D"]:
        """One draw of y for each draw of the latents; of those, as often as they weigh if they have weights."""
        draws = torch.cat([part.sample() for part in self.parts])
        if self.weights is None:
            return draws
        return draws[torch.multinomial(self.weights, len(draws), replacement=True).to(draws.device)]

    def quantile(self, q: float | Sequence[float] | Tensor) -> Float[Tensor, "*quantiles_and_series N D"]:
        """Quantile of y, from its draws; several along a new first dimension, from the same ones.

        :param q: probability between 0 and 1, or several.
        """
        draws = self.sample()
        return draws.quantile(torch.as_tensor(q).to(draws), 0)

    def _average(self, values: Float[Tensor, "draws *series N D"]) -> Float[Tensor, "*series N D"]:
        return values.mean(0) if self.weights is None else torch.tensordot(self.weights.to(values), values, 1)


class Imputation(NamedTuple):
    """Data whose missing entries have been filled.

    :param mean: data where observed, predictive mean where missing.
    :param variance: zero where observed, predictive variance where missing.
    """

    mean: Float[Tensor, "*series N D"]
    variance: Float[Tensor, "*series N D"]

    @property
    def stddev(self) -> Float[Tensor, "*series N D"]:
        """Standard deviation of y."""
        return self.variance.sqrt()
