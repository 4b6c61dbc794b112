"""Predictive distribution of an observation of a Gaussian function value."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp._utils.density_limits import log_prob_limit
from pyro_lvgp.likelihoods import Likelihood

__all__ = ["LikelihoodPredictive", "LikelihoodTerm", "ObservedRows"]

LikelihoodTerm = Literal["svgp", "fitc", "sampled"]


class LikelihoodPredictive(dist.TorchDistribution):
    r"""Predictive distribution of an observation y of a Gaussian function value, ``f ~ N(mean, variance)``, ``y ~ p(y | f)``.

    Samples have the marginal distribution of y.  ``log_prob`` returns one of the likelihood terms of sparse Gaussian
    processes:

    - ``"svgp"``: ``E[log p(y | f)]``, a lower bound on the log predictive density, so that bounds built on it are valid;
    - ``"fitc"``: ``log E[p(y | f)]``, the log predictive density;
    - ``"sampled"``: ``log p(y | f)`` at one new draw of f, an unbiased estimate of the first.

    :param likelihood: likelihood p(y | f, θ).
    :param mean: mean of f, broadcast against ``variance`` to ``[*batch]``.
    :param variance: variance of f.
    :param term: the likelihood term.
    :param params: parameter of the likelihood, as read by the model; the current value by default.

    Source: Hensman et al. (2015), "Scalable variational Gaussian process classification"; Snelson and Ghahramani (2006).

    >>> from pyro_lvgp.likelihoods import Gaussian
    >>> y = LikelihoodPredictive(Gaussian(1.0), torch.zeros(2), torch.tensor([0.0, 1.0]), "svgp")
    >>> y.log_prob(torch.zeros(2)).detach() - dist.Normal(0.0, 1.0).log_prob(torch.zeros(2))
    tensor([ 0.0000, -0.5000])
    """

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    def __init__(
        self,
        likelihood: Likelihood,
        mean: Tensor,
        variance: Tensor,
        term: LikelihoodTerm = "svgp",
        params: Tensor | None = None,
        validate_args: bool | None = None,
    ):
        self.likelihood, self.term = likelihood, term
        self.params = likelihood.params() if params is None else params
        self.f_mean, self.f_variance = torch.broadcast_tensors(mean, variance)
        super().__init__(self.f_mean.shape, validate_args=validate_args)

    @property
    def support(self):
        return self._given(self.f_mean).support

    def expand(self, batch_shape, _instance=None):
        mean, variance = self.f_mean.expand(batch_shape), self.f_variance.expand(batch_shape)
        return LikelihoodPredictive(self.likelihood, mean, variance, self.term, self.params, validate_args=False)

    def _given(self, f: Tensor) -> TorchDistributionMixin:
        return self.likelihood.distribution(f, self.params)

    def _draw_function(self, sample_shape=()) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        noise = torch.randn(shape, dtype=self.f_mean.dtype, device=self.f_mean.device)
        return self.f_mean + self.f_variance.clamp_min(torch.finfo(noise.dtype).tiny).sqrt() * noise

    def sample(self, sample_shape=()):
        with torch.no_grad():
            return self._given(self._draw_function(sample_shape)).sample()

    def log_prob(self, value):
        if self.term == "svgp":
            return self.likelihood.expected_log_prob(value, self.f_mean, self.f_variance, self.params)
        if self.term == "fitc":
            return self.likelihood.log_predictive_density(value, self.f_mean, self.f_variance, self.params)
        return self._given(self._draw_function()).log_prob(value)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Compute mean and variance of y."""
        return self.likelihood.moments(self.f_mean, self.f_variance, self.params)

    @property
    def mean(self):
        return self.moments()[0]

    @property
    def variance(self):
        return self.moments()[1]


@log_prob_limit.register
def _limit(fn: LikelihoodPredictive, value: Tensor) -> Tensor:
    return log_prob_limit(fn._given(fn.f_mean), value)


class ObservedRows(dist.Independent):
    """Joint distribution of independent entries of rows, with precomputed log densities of the observed rows.

    The distribution of the entries is created at first use, which ``log_prob`` of the observed rows does not need.

    :param value: observed rows [N, D].
    :param log_prob: their log densities ``[*batch, N]``.
    :param entries: function that creates the distribution of the entries ``[*batch, N, D]``.
    """

    # In Independent these are properties that need the distribution of the entries.
    _validate_args = has_rsample = has_enumerate_support = False

    def __init__(self, value: Tensor, log_prob: Tensor, entries: Callable[[], TorchDistributionMixin]):
        self._value, self._log_prob, self._entries = value, log_prob, entries
        self.reinterpreted_batch_ndims = 1
        torch.distributions.Distribution.__init__(self, log_prob.shape, value.shape[-1:])

    @cached_property
    def base_dist(self):
        return self._entries()

    def expand(self, batch_shape, _instance=None):
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        return self.base_dist.to_event(1).expand(batch_shape)

    def log_prob(self, value):
        return self._log_prob if value is self._value else super().log_prob(value)
