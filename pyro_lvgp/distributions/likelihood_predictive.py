"""Predictive distribution of an observation of a Gaussian function value."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import pyro.distributions as dist
import torch
from jaxtyping import Bool
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.density_limits import log_prob_limit
from pyro_lvgp.likelihoods import Likelihood, RowLikelihood

__all__ = ["LikelihoodPredictive", "LikelihoodTerm", "ObservedRows"]

LikelihoodTerm = Literal["svgp", "fitc", "sampled"]


class LikelihoodPredictive(dist.TorchDistribution):
    r"""Predictive distribution of an observation y of a Gaussian function value, ``f ~ N(mean, variance)``, ``y ~ p(y | f)``.

    Samples have the marginal distribution of y.  ``log_prob`` returns one of the likelihood terms of sparse Gaussian
    processes:

    - ``"svgp"``: ``E[log p(y | f)]``, a lower bound on the log predictive density, so that bounds built on it are valid;
    - ``"fitc"``: ``log E[p(y | f)]``, the log predictive density;
    - ``"sampled"``: ``log p(y | f)`` at one new draw of f, an unbiased estimate of the first.

    The batch shape is that of f.  For a :class:`~pyro_lvgp.likelihoods.RowLikelihood` the last dimension of f is the event
    shape, and the likelihood terms are those of the observed entries of a row.  :meth:`rows` is the joint distribution of a
    row for every likelihood.

    :param likelihood: likelihood p(y | f, θ).
    :param mean: mean of f, broadcast against ``variance`` to ``[*batch]``.
    :param variance: variance of f.
    :param term: the likelihood term.
    :param params: parameter of the likelihood, as read by the model; the current value by default.
    :param observed: for a ``RowLikelihood``, mask of the observed entries; None if all are observed.

    Source: Hensman et al. (2015), "Scalable variational Gaussian process classification"; Snelson and Ghahramani (2006).

    >>> from pyro_lvgp.likelihoods import Gaussian
    >>> y = LikelihoodPredictive(Gaussian(1.0), torch.zeros(2), torch.tensor([0.0, 1.0]), "svgp")
    >>> y.log_prob(torch.zeros(2)).detach() - dist.Normal(0.0, 1.0).log_prob(torch.zeros(2))
    tensor([ 0.0000, -0.5000])
    """

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    @checks_types
    def __init__(
        self,
        likelihood: Likelihood,
        mean: Tensor,
        variance: Tensor,
        term: LikelihoodTerm = "svgp",
        params: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        observed: Bool[Tensor, "N D"] | None = None,
    ):
        self.likelihood, self.term, self.observed = likelihood, term, observed
        self.params = likelihood.params() if params is None else params
        self.f_mean, self.f_variance = torch.broadcast_tensors(mean, variance)
        num_batch_dims = self.f_mean.dim() - isinstance(likelihood, RowLikelihood)
        shape = self.f_mean.shape
        super().__init__(shape[:num_batch_dims], shape[num_batch_dims:], validate_args=validate_args)

    @property
    def support(self):
        return self._given(self.f_mean).support

    def expand(self, batch_shape, _instance=None):
        shape = torch.Size(batch_shape) + self.event_shape
        return self._replace(mean=self.f_mean.expand(shape), variance=self.f_variance.expand(shape))

    def _replace(self, **changes: Any) -> "LikelihoodPredictive":
        """Copy with other values of some arguments."""
        same = {"mean": self.f_mean, "variance": self.f_variance, "term": self.term, "params": self.params}
        same |= {"observed": self.observed, "validate_args": False}
        return LikelihoodPredictive(self.likelihood, **(same | changes))

    def repeat_rows(self, indices: slice, num_rows: int) -> "LikelihoodPredictive":
        """Distribution of shape [S, B, D]: for each of S rows of this one, ``num_rows`` rows that have its function values.

        :param indices: which rows.
        :param num_rows: number of rows B.

        >>> from pyro_lvgp.likelihoods import Gaussian
        >>> y = LikelihoodPredictive(Gaussian(1.0), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(()))
        >>> y.repeat_rows(slice(1, 2), 3).mean[0, 2]
        tensor([3., 4.])
        """
        mean, variance = (x[indices, None].expand(-1, num_rows, -1) for x in (self.f_mean, self.f_variance))
        return self._replace(mean=mean, variance=variance)

    def rows(self, observed: Bool[Tensor, "N D"] | None = None) -> Any:
        """Joint distribution of the observed entries of each row, of event shape [D].

        :param observed: mask of the observed entries; None if all are observed.

        >>> from pyro_lvgp.likelihoods import Gaussian
        >>> y = LikelihoodPredictive(Gaussian(1.0), torch.zeros(3, 2), torch.zeros(()))
        >>> y.rows().batch_shape, y.rows().event_shape
        (torch.Size([3]), torch.Size([2]))
        """
        if isinstance(self.likelihood, RowLikelihood):
            return self._replace(observed=observed)
        return (self if observed is None else self.mask(observed)).to_event(1)

    def condition(self, y: Tensor) -> "LikelihoodPredictive":
        """Distribution of the missing entries of each row given the observed ones, which changes under a ``RowLikelihood``.

        Entries with independent noise are independent given the moments of f, and their distribution is the same.

        :param y: rows, NaN where missing.

        >>> from pyro_lvgp.likelihoods import LowRankGaussian
        >>> likelihood = LowRankGaussian(1, 2, variance=0.5)
        >>> likelihood.cov_factor = torch.ones(2, 1)
        >>> y = LikelihoodPredictive(likelihood, torch.zeros(1, 2), torch.zeros(()))
        >>> y.condition(torch.tensor([[3.0, torch.nan]])).mean[:, 1].detach()  # Σ₂₁ / Σ₁₁ = 1 / 1.5
        tensor([2.0000])
        """
        if not isinstance(self.likelihood, RowLikelihood):
            return self
        value, observed = torch.nan_to_num(y, self.likelihood.fill_value), ~torch.isnan(y)
        params = self.likelihood.condition(value, observed, self.f_mean, self.f_variance, self.params)
        return self._replace(params=params)

    def _given(self, f: Tensor) -> TorchDistributionMixin:
        return self.likelihood.distribution(f, self.params)

    def _draw_function(self, sample_shape=()) -> Tensor:
        shape = torch.Size(sample_shape) + self.f_mean.shape
        noise = torch.randn(shape, dtype=self.f_mean.dtype, device=self.f_mean.device)
        return self.f_mean + self.f_variance.clamp_min(torch.finfo(noise.dtype).tiny).sqrt() * noise

    def sample(self, sample_shape=()):
        with torch.no_grad():
            return self._given(self._draw_function(sample_shape)).sample()

    def log_prob(self, value):
        if isinstance(self.likelihood, RowLikelihood):
            return self._log_prob_of_rows(self.likelihood, value)
        if self.term == "svgp":
            return self.likelihood.expected_log_prob(value, self.f_mean, self.f_variance, self.params)
        if self.term == "fitc":
            return self.log_prob_of_entries(value)
        return self._given(self._draw_function()).log_prob(value)

    def _log_prob_of_rows(self, likelihood: RowLikelihood, value: Tensor) -> Tensor:
        observed = torch.ones_like(value, dtype=torch.bool) if self.observed is None else self.observed
        if self.term == "svgp":
            return likelihood.log_prob_of_rows(value, observed, self.f_mean, self.f_variance, self.params)
        if self.term == "fitc":
            return likelihood.log_predictive_density_of_rows(value, observed, self.f_mean, self.f_variance, self.params)
        return likelihood.log_prob_of_rows(value, observed, self._draw_function(), None, self.params)

    def log_prob_of_entries(self, value: Tensor) -> Tensor:
        """Compute the log predictive density of each entry by itself, of the shape of f under every likelihood.

        :param value: values of the entries, in the support of the likelihood.
        """
        return self.likelihood.log_predictive_density(value, self.f_mean, self.f_variance, self.params)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Compute mean and variance of each entry of y."""
        return self.likelihood.moments(self.f_mean, self.f_variance, self.params)

    @property
    def mean(self):
        return self.moments()[0]

    @property
    def variance(self):
        return self.moments()[1]


class ObservedRows(dist.TorchDistribution):
    """Joint distribution of rows, with precomputed log densities of the observed rows.

    The distribution of the rows is created at first use, which ``log_prob`` of the observed rows does not need.

    :param value: observed rows [N, D].
    :param log_prob: their log densities ``[*batch, N]``.
    :param create: function that creates the distribution of rows, of batch shape ``[*batch, N]``.

    >>> y = torch.zeros(3, 2)
    >>> rows = ObservedRows(y, torch.tensor([-1.0, -2.0, -3.0]), lambda: dist.Normal(y, 1.0).to_event(1))
    >>> rows.log_prob(y), rows.log_prob(y + 0.0)
    (tensor([-1., -2., -3.]), tensor([-1.8379, -1.8379, -1.8379]))
    """

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    def __init__(self, value: Tensor, log_prob: Tensor, create: Callable[[], TorchDistributionMixin]):
        self._value, self._log_prob, self._create = value, log_prob, create
        super().__init__(log_prob.shape, value.shape[-1:], validate_args=False)

    @cached_property
    def rows(self) -> Any:
        """Distribution of the rows."""
        return self._create()

    def expand(self, batch_shape, _instance=None):
        return self if torch.Size(batch_shape) == self.batch_shape else self.rows.expand(batch_shape)

    def log_prob(self, value):
        return self._log_prob if value is self._value else self.rows.log_prob(value)

    def sample(self, sample_shape=()):
        return self.rows.sample(sample_shape)

    @property
    def support(self):
        return self.rows.support

    @property
    def mean(self):
        return self.rows.mean

    @property
    def variance(self):
        return self.rows.variance


@log_prob_limit.register
def _limit(fn: LikelihoodPredictive, value: Tensor) -> Tensor:
    return log_prob_limit(fn._given(fn.f_mean), value)


@log_prob_limit.register
def _limit_of_rows(fn: ObservedRows, value: Tensor) -> Tensor:
    return log_prob_limit(fn.rows, value)
