"""Split-conformal intervals, calibrated on held-out entries."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.validation import check_tensors
from pyro_lvgp.models import Prediction

__all__ = ["Calibration", "calibrate"]

Score = Literal["stddev", "quantile"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Split-conformal intervals, made by :func:`calibrate`.

    :param level: guaranteed coverage.
    :param score: ``"stddev"`` or ``"quantile"``.
    :param radius: R, in predictive standard deviations: one number, or one for each column ``[D]``.
    """

    level: float
    score: Score
    radius: Float[Tensor, "..."]

    def interval(self, prediction: Prediction) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Compute lower and upper ends of the interval of each entry, in the units of y.

        The ends are not clipped to the support of the likelihood.

        :param prediction: prediction by the procedure that predicted the calibration entries.
        :returns: lower and upper ends, of the shape of the prediction.
        :raises ValueError: if there is a radius for each column and the prediction has another number of columns, or with
            ``"quantile"`` if the prediction is too large for quantiles.
        """
        if self.radius.dim() and prediction.shape[-1:] != self.radius.shape:
            raise ValueError(
                f"expected a prediction of the {len(self.radius)} columns of the calibration, got shape "
                f"{list(prediction.shape)}; predict the same columns, or pool them by per_column=False"
            )
        inner_lower, inner_upper = _inner_interval(prediction, self.score, self.level)
        margin = self.radius * prediction.stddev
        lower = inner_lower - margin - _rounding(inner_lower, margin)
        upper = inner_upper + margin + _rounding(inner_upper, margin)
        # A negative margin may be more than half of the inner interval: such an interval is empty, and becomes a point.
        middle = 0.5 * (lower + upper)
        return torch.minimum(lower, middle), torch.maximum(upper, middle)


@names_types
def calibrate(
    prediction: Prediction,
    y: Float[Tensor, "*shape"],
    *,
    level: float = 0.9,
    score: Score = "stddev",
    per_column: bool = False,
) -> Calibration:
    r"""Calibrate the intervals of predictions on held-out entries (split conformal prediction).

    The score of a calibration entry is its distance from an inner interval :math:`[a, b]`, in predictive standard deviations,
    negative inside. The radius is the k-th smallest of the n scores, and widens the inner intervals of other entries:

    .. math::

        s_i = \max(a_i - y_i,\; y_i - b_i) / \sigma_i, \qquad R = s_{(k)}, \quad k = \lceil (n + 1)\, \ell \rceil, \qquad
        [a - R \sigma,\; b + R \sigma]

    **Guarantee.**  If the calibration entries and a further entry are exchangeable given the fit, the interval of the further
    entry covers it with a probability of at least the level :math:`\ell`, and, if no scores are equal, of at most
    :math:`\ell + 1 / (n + 1)`, whatever the model, its likelihood and the quality of the fit.  The probability is over the
    calibration entries too: given these, and with n large, the coverage has a standard deviation of about
    :math:`\sqrt{\ell (1 - \ell) / n}`.

    Entries are exchangeable if those to calibrate on are a random choice of all entries that the fit did not use.  Entries
    hidden at random are not exchangeable with entries of other rows, of later times, or missing for a reason, and entries
    that the fit used with none of them.

    :param prediction: prediction of the calibration entries by a fit that did not use them.
    :param y: values of the calibration entries; NaN elsewhere.
    :param level: coverage :math:`\ell` to guarantee, between 0 and 1.
    :param score: ``"stddev"``: the inner interval is the predictive mean, a = b; or ``"quantile"``: it lies between the
        predictive quantiles :math:`(1 - \ell) / 2` and :math:`(1 + \ell) / 2`, so that the intervals of skewed predictive
        distributions are not symmetrical.
    :param per_column: calibrate each column, the last dimension of y, by its own entries.  The guarantee then holds in each
        column, and otherwise on average over all entries.
    :raises ValueError: for a level that is not between 0 and 1, another score, a y of another shape, an infinite value, a
        predictive standard deviation that is zero, infinite or NaN at a calibration entry, or fewer calibration entries, of a
        column if ``per_column``, than the level needs: :math:`\lceil \ell / (1 - \ell) \rceil`, 9 for 90 %.  With
        ``"quantile"`` also if the prediction is too large for quantiles.
    :raises TypeError: if y is no tensor.

    >>> import pyro.distributions as dist
    >>> y = torch.randn(200, 3)
    >>> overconfident = Prediction([dist.Normal(torch.zeros(1, 200, 3), 0.1)])
    >>> is_calibration = torch.rand(200, 3) < 0.5
    >>> calibration = calibrate(overconfident, y.masked_fill(~is_calibration, torch.nan), level=0.8)
    >>> lower, upper = calibration.interval(overconfident)
    >>> is_covered = (lower <= y) & (y <= upper)
    >>> 0.7 < is_covered[~is_calibration].float().mean() < 0.9
    tensor(True)

    Source: Vovk, Gammerman and Shafer (2005), "Algorithmic learning in a random world"; Lei, G'Sell, Rinaldo, Tibshirani and
    Wasserman (2018), "Distribution-free predictive inference for regression", theorem 2.2; Romano, Patterson and Candès
    (2019), "Conformalized quantile regression", with the scores divided by the predictive standard deviation.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"expected a level between 0 and 1, got {level}; divide percentages by 100")
    if score not in get_args(Score):
        raise ValueError(f"expected score in {get_args(Score)}, got {score!r}")
    check_tensors([y])
    if y.shape != prediction.shape:
        raise ValueError(
            f"expected y of the shape {list(prediction.shape)} of the prediction, got {list(y.shape)}; set entries that are "
            "not for calibration to NaN"
        )
    is_calibration = ~y.isnan()
    _check_entries(prediction, y, is_calibration)
    lower, upper = _inner_interval(prediction, score, level)
    scores = torch.maximum(lower - y, y - upper) / prediction.stddev
    if not per_column:
        return Calibration(level, score, _radius(scores[is_calibration], level, ""))
    if not y.dim():
        raise ValueError("expected a prediction with columns for per_column=True, got one of a single entry")
    columns = range(y.shape[-1])
    radii = [_radius(scores[..., d][is_calibration[..., d]], level, f" in column {d}") for d in columns]
    return Calibration(level, score, torch.stack(radii))


def _inner_interval(prediction: Prediction, score: Score, level: float) -> tuple[Tensor, Tensor]:
    """Return the ends of the intervals that the scores are distances from."""
    if score == "stddev":
        return prediction.mean, prediction.mean
    lower, upper = prediction.quantile([0.5 * (1.0 - level), 0.5 * (1.0 + level)])
    return lower, upper


def _rounding(end: Tensor, margin: Tensor) -> Tensor:
    """Bound the rounding errors of an end and of the scores, which could exclude many values with equal scores."""
    return 4.0 * torch.finfo(margin.dtype).eps * (end.abs() + margin.abs())


def _radius(scores: Float[Tensor, " n"], level: float, where: str) -> Float[Tensor, ""]:
    """Return the score of rank k = ⌈(n + 1) level⌉; raise if there are fewer scores than k."""
    # Rounded, because (n + 1) level may be above an integer by a rounding error.
    rank = math.ceil(round((len(scores) + 1) * level, 9))
    if rank > len(scores):
        needed = math.ceil(round(level / (1.0 - level), 9))
        raise ValueError(
            f"expected at least {needed} calibration entries{where} for level {level}, got {len(scores)}; hide more entries, "
            f"lower the level{', or pool the columns by per_column=False' if where else ''}"
        )
    return scores.kthvalue(rank).values


def _check_entries(prediction: Prediction, y: Tensor, is_calibration: Bool[Tensor, "*shape"]) -> None:
    """Raise unless the calibration entries are finite, and their predictions have a positive standard deviation."""
    if y[is_calibration].isinf().any():
        raise ValueError("expected finite calibration entries, got infinite ones; set these to NaN")
    mean, stddev = prediction.mean[is_calibration], prediction.stddev[is_calibration]
    is_usable = mean.isfinite() & (stddev > 0.0) & stddev.isfinite()
    if not is_usable.all():
        raise ValueError(
            "expected predictions of the calibration entries with a finite mean and a positive, finite standard deviation, "
            f"got {int((~is_usable).sum())} of {len(stddev)} without: an imputation has point masses at entries that the "
            "model was given; pass predictions by a fit from which these entries were hidden"
        )
