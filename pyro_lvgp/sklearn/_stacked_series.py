"""Mixtures of predictions of a series, whose weights depend on whether an input has data."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp.diagnostics import stacking_weights
from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.models import Prediction

__all__ = ["Shares", "hidden_log_prob", "mix", "stack"]

_FACTORS = (1.0, 1.4, 2.0, 3.0)  # of predictive standard deviations
_LEAST_WEIGHT = 0.01

Block = tuple[str, float]


class Shares(NamedTuple):
    """Weights of a mixture of candidates, each with several factors on its standard deviations.

    :param weights: weight of each candidate.
    :param factors: share of each factor, by candidate.
    """

    weights: dict[str, float]
    factors: dict[str, dict[float, float]]

    @classmethod
    def from_log_prob(
        cls, log_prob: Mapping[str, Mapping[float, Float[Tensor, " H"]]], hidden: Sequence[Bool[Tensor, "N D"]]
    ) -> "Shares":
        """Choose the weights under which hidden entries have the highest density, first of the factors, then of candidates.

        Entries of one gap depend on each other.  So the evidence on factors is that of as many observations as there are gaps
        in time, and that on candidates of as many as there are gaps in all outputs.

        :param log_prob: log densities of the hidden entries by candidate and factor.
        :param hidden: mask of these entries of each fold.
        """
        num_gaps = sum(_num_runs(each.any(1, keepdim=True)) for each in hidden)
        mixed, factors = {}, {}
        for name, by_factor in log_prob.items():
            factors[name] = stacking_weights(by_factor, num_independent=float(num_gaps))
            mixed[name] = torch.stack(
                [by_factor[factor] + math.log(share) for factor, share in factors[name].items()]
            ).logsumexp(0)
        weights = stacking_weights(mixed, num_independent=float(sum(map(_num_runs, hidden))))
        large = {name: weight for name, weight in weights.items() if weight >= _LEAST_WEIGHT}
        return cls(_normalised(large), {name: factors[name] for name in large})

    def blocks(self) -> dict[Block, float]:
        """Return the weight of each pair of a candidate and a factor."""
        return {
            (name, factor): weight * share
            for name, weight in self.weights.items()
            for factor, share in self.factors[name].items()
        }


def hidden_log_prob(
    predicted: Mapping[str, Sequence[Prediction]], data: Float[Tensor, "N D"], folds: Sequence[Bool[Tensor, "N D"]]
) -> dict[str, dict[float, Float[Tensor, " H"]]]:
    """Compute log densities of the entries that are hidden in the folds, by candidate and factor, fold after fold.

    :param predicted: predictions of each candidate, one for each fold.
    :param data: data, NaN where missing.
    :param folds: mask of the entries that are missing in each fold.
    """
    hidden = [fold & ~data.isnan() for fold in folds]
    return {
        name: {
            factor: torch.cat([_widened(each, factor).log_prob(data)[part] for each, part in zip(parts, hidden, strict=True)])
            for factor in _FACTORS
        }
        for name, parts in predicted.items()
    }


def stack(
    log_prob: Mapping[str, Mapping[float, Float[Tensor, " H"]]],
    data: Float[Tensor, "N D"],
    folds: Sequence[Bool[Tensor, "N D"]],
) -> tuple[Shares, Shares]:
    """Choose the weights at inputs with data and at inputs without, by the predictions of hidden entries of both kinds.

    A kind without hidden entries has the weights of all.

    :param log_prob: returned by :func:`hidden_log_prob`.
    :param data: data, NaN where missing.
    :param folds: mask of the entries that are missing in each fold.
    """
    missing = data.isnan()
    hidden = [fold & ~missing for fold in folds]
    are_empty = [(missing | fold).all(1, keepdim=True) for fold in folds]
    with_data = [part & ~is_empty for part, is_empty in zip(hidden, are_empty, strict=True)]
    without_data = [part & is_empty for part, is_empty in zip(hidden, are_empty, strict=True)]

    def shares(kind: Sequence[Tensor]) -> Shares:
        if not any(each.any() for each in kind):
            return Shares.from_log_prob(log_prob, hidden)
        chosen = torch.cat([each[part] for each, part in zip(kind, hidden, strict=True)])
        of_kind = {
            name: {factor: values[chosen] for factor, values in by_factor.items()} for name, by_factor in log_prob.items()
        }
        return Shares.from_log_prob(of_kind, kind)

    return shares(with_data), shares(without_data)


def mix(
    predictions: Mapping[str, Prediction], with_data: Shares, without_data: Shares, is_empty: Bool[Tensor, " N"]
) -> Prediction:
    """Mix predictions of candidates, with other weights at inputs that have no data.

    The distribution of each entry is the mixture by the weights of its input.  Components of both kinds of inputs are joined
    in one mixture by their order, in intervals of the cumulative weights.

    :param predictions: prediction of each candidate.
    :param with_data: weights at inputs with data.
    :param without_data: weights at inputs without data.
    :param is_empty: whether an input has no data.

    >>> from pyro_lvgp.likelihoods import Gaussian
    >>> def prediction(mean):
    ...     f = torch.full((1, 2, 1), mean)
    ...     return Prediction([LikelihoodPredictive(Gaussian(), f, 0.1 + 0.0 * f, "fitc", 0.1 + 0.0 * f)])
    >>> first, second = (Shares({"a": w, "b": 1.0 - w}, {"a": {1.0: 1.0}, "b": {1.0: 1.0}}) for w in (0.75, 0.5))
    >>> mix({"a": prediction(0.0), "b": prediction(1.0)}, first, second, torch.tensor([False, True])).mean.squeeze()
    tensor([0.2500, 0.5000])
    """
    first, second = with_data.blocks(), without_data.blocks()
    if is_empty.all():
        first = second
    elif not is_empty.any():
        second = first
    widened = cache(lambda block: _widened(predictions[block[0]], block[1]))
    joined, lengths = [], []
    for a, b, length in _coupled(first, second):
        joined.append(widened(a) if a == b else _select(widened(a), widened(b), is_empty))
        lengths.append(length)
    return Prediction.pool(joined, lengths)


def _coupled(first: Mapping[Block, float], second: Mapping[Block, float]) -> Iterator[tuple[Block, Block, float]]:
    """Yield the pairs of blocks whose intervals of the cumulative weights overlap, and the length of the overlap."""
    left, right = list(first.items()), list(second.items())
    while left and right:
        (a, of_a), (b, of_b) = left[0], right[0]
        length = min(of_a, of_b)
        if length > 0.0:
            yield a, b, length
        left[:1] = [(a, of_a - length)] if of_a > length else []
        right[:1] = [(b, of_b - length)] if of_b > length else []


def _select(first: Prediction, second: Prediction, is_second: Bool[Tensor, " N"]) -> Prediction:
    """Take the components of the second prediction at some inputs, and those of the first at all others."""
    rows = is_second[:, None]
    parts = []
    for a, b in zip(first.parts, second.parts, strict=True):
        pairs = ((a.f_mean, b.f_mean), (a.f_variance, b.f_variance), (a.params, b.params))
        f_mean, f_variance, params = (torch.where(rows, y, x) for x, y in pairs)
        parts.append(LikelihoodPredictive(a.likelihood, f_mean, f_variance, "fitc", params))
    return Prediction(parts, dims=first.dims, coords=first.coords)


def _widened(prediction: Prediction, factor: float) -> Prediction:
    """Multiply the deviations of y from its mean, in predictions with Gaussian components, by a factor."""
    mean, parts = prediction.mean, []
    for part in prediction.parts:
        f_mean, f_variance = mean + factor * (part.f_mean - mean), factor**2 * part.f_variance
        parts.append(LikelihoodPredictive(part.likelihood, f_mean, f_variance, "fitc", factor**2 * part.params))
    return Prediction(parts, dims=prediction.dims, coords=prediction.coords)


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _num_runs(mask: Bool[Tensor, "N D"]) -> int:
    """Number of runs of entries that follow each other in a column."""
    return int(mask[0].sum()) + int((mask[1:] & ~mask[:-1]).sum())
