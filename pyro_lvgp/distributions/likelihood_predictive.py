"""Predictive distribution of an observation given a Gaussian function value."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_lvgp.likelihoods import Likelihood

LikelihoodTerm = Literal["svgp", "fitc", "sampled"]


class LikelihoodPredictive(dist.TorchDistribution):
    r"""Observation y of a function value that is itself Gaussian: ``f ~ N(mean, variance)``, ``y ~ p(y | f)``.

    Samples come from the true marginal of y.  What ``log_prob`` returns is the likelihood term of sparse Gaussian
    processes that the model asks for:

    - ``"svgp"``: ``E[log p(y | f)]``, never above the log marginal, so every bound built on it stays a bound;
    - ``"fitc"``: ``log E[p(y | f)]``, the log marginal itself;
    - ``"sampled"``: ``log p(y | f)`` at one fresh draw of f, an unbiased estimate of the first.

    :param likelihood: p(y | f, θ).
    :param mean: mean of f, broadcast against ``variance`` to ``[*batch]``.
    :param variance: variance of f.
    :param term: which of the three.
    :param params: parameter of the likelihood, read by the model; the present one if omitted.

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
        """Mean and variance of y."""
        return self.likelihood.moments(self.f_mean, self.f_variance, self.params)

    @property
    def mean(self):
        return self.moments()[0]

    @property
    def variance(self):
        return self.moments()[1]


class ObservedRows(dist.Independent):
    """Rows of independent entries, with the log densities of one set of rows known beforehand.

    For any other value, and for everything else, the entries are made, once.

    :param value: rows [N, D].
    :param log_prob: their log densities ``[*batch, N]``.
    :param entries: makes the distribution of the entries ``[*batch, N, D]``.
    """

    # Properties of Independent that would make the entries.
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
