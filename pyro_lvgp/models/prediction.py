"""Predictive distributions: mixtures over posterior draws."""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types, names_types
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.likelihoods import RowLikelihood
from pyro_lvgp.models._mixture import MixtureMoments, pooled_weights, systematic_counts

__all__ = ["Prediction"]

Coords = Mapping[str, tuple[Sequence[str], Any]]


class Prediction:
    r"""Predictive distribution of each entry of y, in the units of the data: a mixture over posterior draws.

    .. math::

        p(y_{nd} \mid \mathrm{data}) \approx \sum_{s=1}^S w_s\, p_s(y_{nd}), \qquad \sum_{s=1}^S w_s = 1

    with :math:`p_s` the distribution of the entry given draw s of the latents.  Entries are independent given a draw, and
    dependent in the mixture.  ``predict``, ``reconstruct``, ``impute`` and ``forecast`` of every model return this class.

    **Components.**  For models of rows, :math:`p_s(y_{nd}) = E[p(y_{nd} \mid f_{nd})]` is the predictive distribution under
    the Gaussian :math:`f_{nd}` given draw s, whichever bound the model was fitted by.  For models of series, :math:`p_s` is
    the likelihood given f, the decoder's output at draw s.

    Under a :class:`~pyro_lvgp.likelihoods.RowLikelihood` the entries of a row are dependent given a draw, in samples;
    ``log_prob`` and ``quantile`` are those of each entry by itself.

    **Memory.**  Means and variances are always available.  ``log_prob``, ``quantile`` and ``sample`` need the components.
    Predictions of models of rows store the components if draws times entries are at most :attr:`max_size`, :math:`2^{26}` (1
    GiB of means and variances of f in double precision).  Of a larger prediction, only means and variances are computed.

    :param parts: distributions of batch and event shape ``[draws, *shape]``, whose draws together are the components.
    :param weights: :math:`w_s` of the draws of all parts, up to a common factor; equal weights 1 / S if None.
    :param hold_parts: store the parts, not only their moments.
    :param functions: for parts that are p(y | f), the values f of each part, for :attr:`f_mean` and :attr:`f_variance`.  A
        :class:`~pyro_lvgp.distributions.LikelihoodPredictive` has the moments of f itself.
    :param fill_value: number in the support of all entries, at which ``log_prob`` evaluates missing ones.
    :param dims: names of the dimensions of y for :meth:`to_xarray`; ``dim_0``, ``dim_1``, … by default.
    :param coords: dimensions and values (tensors, arrays or labels) of coordinates by name, for :meth:`to_xarray` and
        :meth:`to_pandas`.
    :raises ValueError: if there are no parts, their shapes differ, or the weights are not one for each draw.

    >>> import pyro.distributions as dist
    >>> y = Prediction([dist.Normal(torch.tensor([[[-1.0]], [[1.0]]]), 1.0)], dims=("rows", "columns"))
    >>> y.mean, y.variance
    (tensor([[0.]]), tensor([[2.]]))
    >>> y.log_prob(torch.zeros(1, 1))  # log N(0; 1, 1)
    tensor([[-1.4189]])
    >>> y.sample(5).shape, y.quantile([0.1, 0.9]).shape
    (torch.Size([5, 1, 1]), torch.Size([2, 1, 1]))
    >>> dict(y.to_xarray().sizes)
    {'rows': 1, 'columns': 1, 'quantile': 3}
    """

    max_size: ClassVar[int] = 2**26
    """Largest number of draws times entries of a prediction of a model of rows whose components are stored."""

    @checks_types
    def __init__(
        self,
        parts: Iterable[TorchDistributionMixin],
        weights: Float[Tensor, " draws"] | None = None,
        *,
        hold_parts: bool = True,
        functions: Iterable[Float[Tensor, "draws *shape"]] | None = None,
        fill_value: float = 0.0,
        dims: Sequence[str] = (),
        coords: Coords | None = None,
    ):
        self.weights = None if weights is None else weights / weights.sum()
        self.dims, self.coords = tuple(dims), dict(coords or {})
        self._fill_value = fill_value
        self._observed: Tensor | None = None
        self._has_rows = False
        self._y_moments = MixtureMoments()
        self._f_moments: MixtureMoments | None = MixtureMoments()
        self.num_draws, shape = 0, None
        components = []
        pairs = zip(parts, repeat(None)) if functions is None else zip(parts, functions, strict=True)
        for part, f in pairs:
            if not isinstance(part, TorchDistributionMixin) or not isinstance(f, Tensor | None):
                raise TypeError(
                    f"expected distributions as parts, and tensors as functions, got {type(part).__name__} and "
                    f"{type(f).__name__}"
                )
            shape = part.shape()[1:] if shape is None else shape
            if part.shape()[1:] != shape:
                raise ValueError(
                    f"expected parts of one batch shape [draws, *{list(shape)}], got {list(part.shape())}; expand them"
                )
            self._has_rows = self._has_rows or _is_of_rows(part)
            self._add_moments(part, f)
            if hold_parts:
                components.append(part)
        if shape is None:
            raise ValueError("expected one part or more, got none; pass the distributions of the entries")
        if weights is not None and weights.shape != (self.num_draws,):
            raise ValueError(f"expected {self.num_draws} weights, one for each draw, got {list(weights.shape)}")
        self.shape = shape
        self._parts = tuple(components) if hold_parts else None

    def __repr__(self) -> str:
        return f"Prediction(shape={list(self.shape)}, num_draws={self.num_draws})"

    def _add_moments(self, part: Any, f: Tensor | None) -> None:
        """Count the draws of a part, and merge their moments of y and of f."""
        first, self.num_draws = self.num_draws, self.num_draws + part.batch_shape[0]
        weights = None if self.weights is None else self.weights[first : self.num_draws]
        f_moments: tuple[Tensor, Tensor] | None
        if isinstance(part, LikelihoodPredictive):
            y_moments, f_moments = part.moments(), (part.f_mean, part.f_variance)
        else:
            y_moments, f_moments = (part.mean, part.variance), None if f is None else (f, f.new_zeros(()).expand_as(f))
        self._y_moments.add(*y_moments, weights)
        if f_moments is None:
            self._f_moments = None
        elif self._f_moments is not None:
            self._f_moments.add(*f_moments, weights)

    @classmethod
    @names_types
    def pool(cls, predictions: Iterable["Prediction"], weights: Iterable[float] | Tensor | None = None) -> "Prediction":
        """Mix several predictions of the same data, such as those of fits with different seeds.

        Fits with different seeds end in different optima.  By Jensen's inequality, the log density of an equal mixture is at
        least the mean of the log densities of the predictions.

        :param predictions: predictions of the same shape and number of draws.
        :param weights: one non-negative weight for each prediction, up to a common factor, such as the values of
            :func:`~pyro_lvgp.diagnostics.stacking_weights`; equal weights if None.
        :raises ValueError: if there are no predictions; if they differ in shape, number of draws or observed entries; if one
            was too large to store its components; or if the weights do not fit.
        :raises TypeError: for weights in a mapping by name.

        >>> import pyro.distributions as dist
        >>> runs = [Prediction([dist.Normal(torch.full((1, 1, 1), loc), 1.0)]) for loc in (-1.0, 1.0)]
        >>> Prediction.pool(runs).variance
        tensor([[2.]])

        Source: Lakshminarayanan et al. (2017), "Simple and scalable predictive uncertainty estimation using deep ensembles".
        """
        predictions = tuple(predictions)
        _check_alike(predictions)
        first = predictions[0]
        pooled = cls(
            [part for each in predictions for part in each.parts],
            pooled_weights(first.num_draws, [each.weights for each in predictions], weights),
            fill_value=first._fill_value,
            dims=first.dims,
            coords=first.coords,
        )
        pooled._f_moments = _pooled_f_moments(predictions, pooled.weights)
        pooled._observed = first._observed  # on which the parts are conditioned already
        return pooled

    def with_observed(self, y: Float[Tensor, "*shape"]) -> "Prediction":
        """Replace the distributions of observed entries by point masses at their values.

        The mean, quantiles and samples of an observed entry are y, its variance is 0, and its ``log_prob`` is the log
        probability of the point mass: 0 at y, and minus infinity elsewhere.  Under a
        :class:`~pyro_lvgp.likelihoods.RowLikelihood` the distributions of the missing entries become those given the observed
        entries of the row, for each draw.  ``f_mean`` and ``f_variance`` do not change, and neither do the weights of draws.

        :param y: data, NaN where missing.
        :raises ValueError: if y has another shape than the entries; or, under a ``RowLikelihood``, if the prediction already
            has observed entries or is too large.

        >>> import pyro.distributions as dist
        >>> predicted = Prediction([dist.Normal(torch.zeros(4, 1, 2), 1.0)])
        >>> filled = predicted.with_observed(torch.tensor([[3.0, torch.nan]]))
        >>> filled.mean, filled.variance, filled.log_prob(torch.tensor([[3.0, 0.0]]))
        (tensor([[3., 0.]]), tensor([[0., 1.]]), tensor([[ 0.0000, -0.9189]]))
        """
        self._check_shape(y)
        result = self._conditioned(y) if self._has_rows else copy.copy(self)
        result._observed = y
        return result

    def _conditioned(self, y: Float[Tensor, "*shape"]) -> "Prediction":
        """Condition the distribution of each row on its observed entries."""
        if self._observed is not None:
            raise ValueError(
                "expected a prediction without observed entries, got one that has some; call with_observed once, with all "
                "observed entries"
            )
        parts = [part.condition(y) for part in self.parts]
        return Prediction(parts, self.weights, fill_value=self._fill_value, dims=self.dims, coords=self.coords)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Distributions of the entries, of batch shape ``[draws, *shape]``.

        :raises ValueError: if the prediction was too large to store them.
        """
        if self._parts is None:
            raise ValueError(
                f"expected a prediction of at most {self.max_size} draws times entries for log_prob, quantile or sample, got "
                f"{self.num_draws} draws of {self.shape.numel()} entries, of which only mean and variance were computed; "
                "predict fewer rows at a time, or pass a smaller num_samples"
            )
        return self._parts

    @property
    def mean(self) -> Float[Tensor, "*shape"]:
        """Mean of y."""
        mean = _warn_if_infinite(self._y_moments.mean, "mean")
        return mean if self._observed is None else torch.where(self._observed.isnan(), mean, self._observed)

    @property
    def variance(self) -> Float[Tensor, "*shape"]:
        """Variance of y, noise included, by the law of total variance."""
        variance = _warn_if_infinite(self._y_moments.variance, "variance")
        return variance if self._observed is None else torch.where(self._observed.isnan(), variance, 0.0)

    @property
    def stddev(self) -> Float[Tensor, "*shape"]:
        """Standard deviation of y."""
        return self.variance.sqrt()

    @property
    def f_mean(self) -> Float[Tensor, "*shape"]:
        """Mean of the function f under the likelihood; the decoder's output for models of series.

        :raises ValueError: for a prediction made of distributions of y alone.
        """
        return self._function_moments().mean

    @property
    def f_variance(self) -> Float[Tensor, "*shape"]:
        """Variance of the function f under the likelihood, by the law of total variance.

        :raises ValueError: for a prediction made of distributions of y alone.
        """
        return self._function_moments().variance

    def _function_moments(self) -> MixtureMoments:
        if self._f_moments is None:
            raise ValueError(
                "expected a prediction with function values, got distributions of y alone; pass functions=..., or take mean "
                "and variance, which are those of y"
            )
        return self._f_moments

    def log_prob(self, y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        r"""Log density of each entry of the mixture; NaN where y is NaN.

        .. math::

            \log \sum_s w_s\, p_s(y_{nd})

        :param y: values of the entries, in the support of the likelihood.
        :raises ValueError: if y has another shape than the entries, or the prediction is too large.

        Source: eq. 3.10 of the GP-VAE thesis.
        """
        self._check_shape(y)
        missing = y.isnan()
        fixed = torch.zeros_like(missing) if self._observed is None else ~self._observed.isnan()
        value = y.masked_fill(missing | fixed, self._fill_value)
        log_prob = reduce(torch.logaddexp, [self._log_prob_of_part(*each, value) for each in self._weighted_parts()])
        if self._observed is not None:
            point_mass = torch.where(y == self._observed, 0.0, -torch.inf)
            log_prob = torch.where(fixed, point_mass.to(log_prob), log_prob)
        return log_prob.masked_fill(missing, torch.nan)

    def _log_prob_of_part(self, part: Any, weights: Tensor | None, value: Tensor) -> Float[Tensor, "*shape"]:
        """Log density of the draws of a part, each with its weight in the mixture."""
        log_prob = part.log_prob_of_entries(value) if _is_of_rows(part) else part.log_prob(value)
        if weights is None:
            return log_prob.logsumexp(0) - math.log(self.num_draws)
        return (log_prob + weights.to(log_prob).log().reshape(-1, *[1] * value.dim())).logsumexp(0)

    def sample(self, num_samples: int | None = None) -> Float[Tensor, "samples *shape"]:
        """Draw from the mixture; each sample takes all entries from one draw of the latents.

        Systematic resampling determines the number of samples from each draw by the draw's weight.  Samples are in the order
        of the draws.

        :param num_samples: number of samples; the number of draws if None, with one sample from each draw of equal weights.
        :raises ValueError: if ``num_samples`` is not positive, or the prediction is too large.
        """
        parts = self.parts
        counts = self._samples_of_draws(num_samples).split([part.batch_shape[0] for part in parts])
        draws = torch.cat([_sample_part(part, count) for part, count in zip(parts, counts, strict=True)])
        return draws if self._observed is None else torch.where(self._observed.isnan(), draws, self._observed)

    def _samples_of_draws(self, num_samples: int | None) -> Int[Tensor, " draws"]:
        """Number of samples from each draw."""
        if num_samples is None and self.weights is None:
            return torch.ones(self.num_draws, dtype=torch.long, device="cpu")
        num_samples = self.num_draws if num_samples is None else num_samples
        check_sizes(num_samples=num_samples)
        weights = torch.ones(self.num_draws) if self.weights is None else self.weights
        return systematic_counts(weights, num_samples)

    @names_types
    def quantile(self, q: float | Sequence[float] | Tensor) -> Float[Tensor, "..."]:
        r"""Quantiles of y from samples: the smallest sample such that at least a share q of all samples is at or below it.

        The number of samples S is 1000, or that of the draws if larger; it is smaller if S times the number of entries would
        exceed :attr:`max_size`.  The seed of the samples is computed from the mean, so that every call uses the same samples
        and quantiles do not decrease in q.  Quantiles are in the support of y.  Their standard error is
        :math:`\sqrt{q (1 - q) / S} / p(y)`.

        :param q: one or several probabilities between 0 and 1.
        :returns: quantiles of the shape of y; several q are along a new first dimension.
        :raises ValueError: if a q is not between 0 and 1, or the prediction is too large.
        """
        q = torch.as_tensor(q, dtype=torch.double, device="cpu")
        if not ((q >= 0.0) & (q <= 1.0)).all():
            raise ValueError(f"expected q between 0 and 1, got {q.tolist()}; divide percentages by 100")
        mean = self._y_moments.mean
        seed = int(mean.detach().double().nansum().view(torch.long)) & (2**63 - 1)
        num_samples = max(self.num_draws, min(_NUM_SAMPLES, self.max_size // max(mean.numel(), 1)))
        with seeded(seed):
            samples = self.sample(num_samples).sort(0).values
        rank = (q * num_samples - 1e-6).ceil().long() - 1
        return samples[rank.clamp(0, num_samples - 1).to(samples.device)]

    def to_xarray(self, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Any:
        """Convert to an ``xarray.Dataset`` with the variables ``mean``, ``stddev`` and ``quantiles``.

        Dimensions have the same names as in :func:`~pyro_lvgp.diagnostics.to_arviz`: ``data`` and ``output`` for models of
        rows; ``series`` (if there are several), ``points`` and ``output`` for models of series, whose inputs are the
        coordinate ``x``.

        :param quantiles: probabilities, which become the coordinate ``quantile``; none for a dataset without quantiles.
        :returns: an ``xarray.Dataset``.
        :raises ValueError: as :meth:`quantile`, unless there are no quantiles.
        """
        import xarray  # takes a quarter of a second to import

        dims = self._named_dims
        variables: dict[str, Any] = {
            name: (dims, value.numpy(force=True)) for name, value in (("mean", self.mean), ("stddev", self.stddev))
        }
        coords: dict[str, Any] = {dim: range(size) for dim, size in zip(dims, self.shape, strict=True)}
        coords |= {name: (tuple(names), _as_labels(value)) for name, (names, value) in self.coords.items()}
        if len(quantiles):
            variables["quantiles"] = (("quantile", *dims), self.quantile(list(quantiles)).numpy(force=True))
            coords["quantile"] = list(quantiles)
        return xarray.Dataset(variables, coords)

    def to_pandas(self, statistic: Literal["mean", "stddev", "variance"] | float = "mean") -> Any:
        """Convert a statistic of a table to a ``pandas.DataFrame``, with the index and the columns of the data.

        :param statistic: ``"mean"``, ``"stddev"`` or ``"variance"``, or the probability of a quantile.
        :returns: a ``pandas.DataFrame`` of the shape of y.
        :raises ValueError: for predictions that are no table, another name, and as :meth:`quantile`.

        >>> import pyro.distributions as dist
        >>> coords = {"columns": (("columns",), ["a", "b"])}
        >>> y = Prediction([dist.Normal(torch.zeros(1, 2, 2), 1.0)], dims=("rows", "columns"), coords=coords)
        >>> y.to_pandas("stddev").to_dict("list")
        {'a': [1.0, 1.0], 'b': [1.0, 1.0]}
        """
        import pandas as pd  # takes half a second to import

        if len(self.shape) != 2:
            raise ValueError(f"expected a prediction of rows and columns, got shape {list(self.shape)}; take to_xarray()")
        if isinstance(statistic, str) and statistic not in _STATISTICS:
            raise ValueError(f"expected one of {_STATISTICS} or the probability of a quantile, got {statistic!r}")
        values = getattr(self, statistic) if isinstance(statistic, str) else self.quantile(statistic)
        index, columns = (
            pd.Index(_as_labels(self.coords[dim][1])) if dim in self.coords else pd.RangeIndex(size, name=dim)
            for dim, size in zip(self._named_dims, self.shape, strict=True)
        )
        return pd.DataFrame(values.numpy(force=True), index, columns)

    @property
    def _named_dims(self) -> tuple[str, ...]:
        return self.dims or tuple(f"dim_{i}" for i in range(len(self.shape)))

    def _weighted_parts(self) -> Iterable[tuple[Any, Tensor | None]]:
        sizes = [part.batch_shape[0] for part in self.parts]
        weights = [None] * len(sizes) if self.weights is None else self.weights.split(sizes)
        return zip(self.parts, weights, strict=True)

    def _check_shape(self, y: Tensor) -> None:
        if y.shape != self.shape:
            raise ValueError(
                f"expected y of shape {list(self.shape)}, as the entries predicted, got {list(y.shape)}; expand or index "
                "y to that shape"
            )


_NUM_SAMPLES = 1000  # of quantiles
_STATISTICS = ("mean", "stddev", "variance")


def _as_labels(values: Any) -> Any:
    """Values of a coordinate as an array, or labels as they are."""
    return values.numpy(force=True) if isinstance(values, Tensor) else values


def _is_of_rows(part: Any) -> bool:
    """Whether the entries of a row are dependent given f."""
    return isinstance(part, LikelihoodPredictive) and isinstance(part.likelihood, RowLikelihood)


def _sample_part(part: Any, counts: Int[Tensor, " draws"]) -> Float[Tensor, "samples *shape"]:
    """Sample from each draw of a part, ``counts`` times, in the order of the draws."""
    max_count = int(counts.max())
    with torch.no_grad():
        samples = part.sample((max_count,)).transpose(0, 1)
    return samples[(torch.arange(max_count, device=counts.device) < counts[:, None]).to(samples.device)]


def _warn_if_infinite(moment: Tensor, name: str) -> Tensor:
    """Return a moment, with a warning if entries are not finite."""
    if num := int((~moment.isfinite()).sum()):
        warnings.warn(
            f"the predictive {name} is not finite at {num} of {moment.numel()} entries: exp(f) overflows at draws of the "
            "posterior; take quantile(0.5), float64, or fit again with fewer latents or a smaller learning rate",
            RuntimeWarning,
            stacklevel=3,
        )
    return moment


def _pooled_f_moments(predictions: Sequence[Prediction], weights: Tensor | None) -> MixtureMoments | None:
    """Moments of f in a mixture of predictions, given the weights of all draws; None if one prediction has none."""
    moments = [each._f_moments for each in predictions if each._f_moments is not None]
    if len(moments) < len(predictions):
        return None
    shares = None if weights is None else weights.unflatten(0, (len(predictions), -1)).sum(-1)
    pooled = MixtureMoments()
    pooled.add(torch.stack([each.mean for each in moments]), torch.stack([each.variance for each in moments]), shares)
    return pooled


def _check_alike(predictions: Sequence[Prediction]) -> None:
    """Raise unless predictions have the same shape, number of draws and observed entries."""
    shapes = {(each.num_draws, *each.shape) for each in predictions}
    if len(shapes) != 1:
        raise ValueError(
            f"expected predictions of one shape [draws, *series, N, D], got {sorted(shapes)}; predict the same entries with "
            "the same num_samples"
        )
    first = predictions[0]._observed
    if not all(_same_entries(first, each._observed) for each in predictions):
        raise ValueError(
            "expected predictions with the same observed entries, got different ones; impute the same data, or pool the "
            "results of predict(...)"
        )


def _same_entries(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    same: Bool[Tensor, ...] = (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())
