"""Gaussian processes at a set of inputs, and their posteriors under Gaussian sites, as Pyro distributions."""

from functools import cached_property, partial
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import MultivariateNormal, register_kl

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.cholesky import FIRST_JITTER, safe_cholesky
from pyro_lvgp.distributions._function_values import FunctionValues
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.kernels.base import KernelParams, params_in_double
from pyro_lvgp.ops import gaussian_sites, state_space
from pyro_lvgp.ops.gaussian_sites import Posterior
from pyro_lvgp.ops.state_space import Series

__all__ = ["GaussianProcess", "StructuredPosterior"]

# Number of points at which dense and state-space training steps take the same time: `python -m benchmarks longseries`.
_MIN_STATE_SPACE_POINTS = 200


class GaussianProcess(FunctionValues):
    r"""Zero-mean Gaussian process at a set of inputs, ``f ~ N(0, k(X, X))``.

    The covariance matrix is computed at first use, and factorised for draws and densities only, which
    :class:`~pyro_lvgp.guides.StructuredGPGuide` does not need.  At more than 200 points, draws and densities of processes with
    :attr:`is_markov` take linear time and no matrix.

    :param kernel: covariance function k, or a batch of covariance functions.
    :param X: inputs ``[*batch, N, P]``, which broadcast against the kernel's batch.
    :param params: parameters of the kernel, as read by the model; the current values by default.

    >>> from pyro_lvgp.kernels import RBF
    >>> prior = GaussianProcess(RBF(1, batch_shape=(3,)), torch.linspace(0.0, 1.0, 5)[:, None])
    >>> prior.batch_shape, prior.event_shape, prior.sample().shape
    (torch.Size([3]), torch.Size([5]), torch.Size([3, 5]))
    """

    @checks_types
    def __init__(
        self,
        kernel: Kernel,
        X: Float[Tensor, "*#batch N P"],
        params: KernelParams | None = None,
        validate_args: bool | None = None,
    ):
        self.kernel, self.X, self.params = kernel, X, kernel.params() if params is None else params
        self._unexpanded = self
        self._diagonal = kernel.diagonal(X, self.params)
        super().__init__(self._diagonal.shape[:-1], X.shape[-2:-1], validate_args=validate_args)

    def at(self, X: Float[Tensor, "*#batch M P"]) -> "GaussianProcess":
        """Return the process at other inputs.

        :param X: inputs.
        """
        return GaussianProcess(self.kernel, X, self.params)

    def double(self) -> "GaussianProcess":
        """Return the process in double precision."""
        return GaussianProcess(self.kernel, self.X.double(), params_in_double(self.params))

    @property
    def is_markov(self) -> bool:
        """Whether the process is Gauss–Markov: one column of inputs, and a Matérn kernel or sums and products of them."""
        return self.kernel.is_markov and self.X.shape[-1] == 1

    @property
    def prefers_state_space(self) -> bool:
        """Whether the linear-time algorithms are applicable and faster."""
        return self.is_markov and self.event_shape[0] > _MIN_STATE_SPACE_POINTS

    @cached_property
    def series(self) -> Series:
        """State-space model at the sorted inputs, of the unexpanded batch."""
        if self._unexpanded is not self:
            return self._unexpanded.series
        steps, order, inverse = state_space.sort_inputs(self.X.squeeze(-1))
        return Series(self.kernel.state_space_model(steps, self.params), order, inverse)

    @cached_property
    def covariance_matrix(self) -> Float[Tensor, "*batch N N"]:
        """Covariance matrix K(X, X) of the unexpanded batch."""
        if self._unexpanded is not self:
            return self._unexpanded.covariance_matrix
        return self.kernel.covariance(self.X, self.X, self.params)

    @cached_property
    def scale_tril(self) -> Float[Tensor, "*batch N N"]:
        """Cholesky factor of K(X, X) of the unexpanded batch, with the least jitter that suffices."""
        if self._unexpanded is not self:
            return self._unexpanded.scale_tril
        return safe_cholesky(self.covariance_matrix, name="K(X, X)", describe=self.kernel.parameters_text)

    def covariance_with(self, X: Float[Tensor, "*#batch M P"]) -> Float[Tensor, "*batch M N"]:
        """Compute the cross-covariance matrix K(X', X).

        :param X: other inputs X'.
        """
        return self.kernel.covariance(X, self.X, self.params)

    @property
    def mean(self):
        return self._diagonal.new_zeros(()).expand(self._full_shape)

    @property
    def variance(self):
        return self._diagonal.expand(self._full_shape)

    def rsample(self, sample_shape=()):
        if self.prefers_state_space:
            return self.rsample_state_space(sample_shape)
        noise = self._diagonal.new_empty(torch.Size(sample_shape) + self._full_shape).normal_()
        return (self.scale_tril @ noise[..., None]).squeeze(-1)

    def rsample_state_space(self, sample_shape=()):
        """Draw samples from the state-space model, which needs no jitter.

        :param sample_shape: leading dimensions of the samples.
        """
        shape = torch.Size(sample_shape) + self._full_shape
        noise = self._diagonal.new_empty(*shape, self.series.model.emission.shape[-1]).normal_()
        return state_space.sample_prior(self.series, noise)

    def log_prob(self, value):
        if self._validate_args:
            self._validate_sample(value)
        if self.prefers_state_space:
            value = value.expand(torch.broadcast_shapes(value.shape, self._full_shape))
            return state_space.log_prob(self.series, value, jitter=FIRST_JITTER[value.dtype])
        return MultivariateNormal(self.mean, scale_tril=self.scale_tril, validate_args=False).log_prob(value)


class StructuredPosterior(FunctionValues):
    r"""Posterior of a Gaussian prior under Gaussian sites, ``q(f) ∝ p(f) ∏_n N(f_n; μ_n, v_n)``.

    Mean, variance and the KL from the prior need one Cholesky factorisation, of ``I + W K W``.  Joint samples and densities
    need that of the prior, and that of ``I + W K W`` with the jitter of the prior's factor.  All factorisations are in double
    precision.

    :param prior: a :class:`GaussianProcess` or ``MultivariateNormal``.
    :param site_mean: means μ of the sites.
    :param site_precision: precisions 1/v of the sites, zero for points without one.  A precision of more than 1e11 times that
        of the prior counts as 1e11 times.

    Source: eqs. 3.5 to 3.9 of the GP-VAE thesis; see :mod:`pyro_lvgp.ops.gaussian_sites`.

    >>> prior = dist.MultivariateNormal(torch.zeros(2), torch.eye(2))
    >>> posterior = StructuredPosterior(prior, torch.tensor([2.0, 5.0]), torch.tensor([1.0, 0.0]))
    >>> posterior.mean, posterior.variance
    (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """

    @checks_types
    def __init__(
        self,
        prior: torch.distributions.Distribution,
        site_mean: Float[Tensor, "*#batch N"],
        site_precision: Float[Tensor, "*#batch N"],
        validate_args: bool | None = None,
    ):
        self.prior: Any = prior
        self.site_mean, self.site_precision = site_mean, site_precision
        self._unexpanded = self
        shape = torch.broadcast_shapes(prior.batch_shape + prior.event_shape, site_mean.shape, site_precision.shape)
        super().__init__(shape[:-1], shape[-1:], validate_args=validate_args)

    @cached_property
    def posterior(self) -> Posterior:
        """Moments and Cholesky factors of the unexpanded batch, in double precision."""
        if self._unexpanded is not self:
            return self._unexpanded.posterior
        return self._condition(self._exact_prior.covariance_matrix)

    @cached_property
    def _exact_prior(self) -> Any:
        """Prior in double precision: for sites of high precision, rounding in single precision makes the KL negative."""
        prior = self.prior
        if self.site_mean.dtype == torch.float64:
            return prior
        if isinstance(prior, GaussianProcess):
            return prior.double()
        return MultivariateNormal(prior.mean.double(), scale_tril=prior.scale_tril.double(), validate_args=False)

    def _condition(self, covariance: Float[Tensor, "*batch N N"]) -> Posterior:
        """Compute the posterior for a covariance matrix of the prior."""
        # The eigenvalues of I + W K W are at least 1: rounding alone makes jitter necessary.
        cholesky = partial(safe_cholesky, jitter=0.0, name="I + W K W")
        site_mean, site_precision = self.site_mean.double(), self._bounded_precision().double()
        return gaussian_sites.condition(covariance, self._exact_prior.mean, site_mean, site_precision, cholesky)

    def _bounded_precision(self) -> Tensor:
        """Precisions of the sites, bounded relative to those of the prior."""
        return gaussian_sites.bounded_precision(self.site_precision, self._unexpanded.prior.variance)

    @cached_property
    def _joint(self) -> Posterior:
        """Posterior of the prior of joint draws, whose covariance is that of the Cholesky factor, with jitter."""
        if self._unexpanded is not self:
            return self._unexpanded._joint
        tril = self._exact_prior.scale_tril
        return self._condition(tril @ tril.mT) if isinstance(self.prior, GaussianProcess) else self.posterior

    @property
    def mean(self):
        return self.posterior.mean.to(self.site_mean).expand(self._full_shape)

    @property
    def variance(self):
        return _round_variance(self.posterior.variance, self.site_mean).expand(self._full_shape)

    def rsample(self, sample_shape=()):
        """Draw joint samples by Matheron's rule."""
        tril, mean = self._exact_prior.scale_tril, self._exact_prior.mean
        noise = mean.new_empty(2, *sample_shape, *self._full_shape).normal_()
        drawn = (tril @ noise[0, ..., None]).squeeze(-1)
        return (mean + gaussian_sites.sample_posterior(self._joint, drawn, tril @ tril.mT, noise[1])).to(self.site_mean)

    def rsample_marginals(self) -> Float[Tensor, "*batch N"]:
        """Draw independent entries from the marginals, for expectations of functions of single f_n."""
        mean = self.mean
        return mean + self.variance.sqrt() * torch.randn_like(mean)

    def log_prob(self, value):
        sites = gaussian_sites.log_sites(self._joint, value - self._exact_prior.mean).sum(-1)
        return self.prior.log_prob(value) + (sites - gaussian_sites.log_normaliser(self._joint)).to(value)

    def at(self, X: Float[Tensor, "*#batch M P"], *, joint: bool = False) -> Any:
        """Compute the posterior of the process at other inputs.

        :param X: inputs.
        :param joint: whether to return the joint distribution instead of the marginals.
        :returns: ``Normal`` with the marginals, or a ``MultivariateNormal``.
        :raises TypeError: if the prior is no :class:`GaussianProcess`.
        """
        if not isinstance(self.prior, GaussianProcess):
            raise TypeError(
                f"expected a GaussianProcess prior, which has values at other inputs, got {type(self.prior).__name__}; "
                "call the guide with the inputs of the data and the new inputs together, and NaN for the data at new inputs"
            )
        # After precise sites the covariance can be smaller than the rounding errors of the prior's in single precision.
        new, K_new = self._exact_prior.at(X.double()), self._exact_prior.covariance_with(X.double())
        mean, variance = gaussian_sites.predict(self.posterior, K_new, new._diagonal, torch.zeros_like(new._diagonal))
        if not joint:
            return dist.Normal(mean.to(X), _round_variance(variance, X).sqrt())
        covariance = gaussian_sites.predictive_covariance(self.posterior, K_new, new.covariance_matrix)
        rounding = sum(K_new.shape[-2:]) * torch.finfo(K_new.dtype).eps * new._diagonal  # errors of the prior's covariance
        scale_tril = safe_cholesky(covariance + torch.diag_embed(rounding), name="posterior covariance")
        return dist.MultivariateNormal(mean.to(X), scale_tril=scale_tril.to(X))


@register_kl(StructuredPosterior, GaussianProcess)
@register_kl(StructuredPosterior, MultivariateNormal)
def _kl_from_prior(q, p):
    """Compute the KL from p, which must be the prior of q."""
    if _kernel(q.prior) is not _kernel(p):
        raise NotImplementedError
    return gaussian_sites.kl_divergence(q.posterior).to(q.site_mean).expand(q.batch_shape)


def _round_variance(variance: Tensor, like: Tensor) -> Tensor:
    """Convert variances to the precision of a tensor, in which they stay positive."""
    variance = variance.to(like)
    return gaussian_sites.positive_variance(variance, torch.zeros_like(variance))


def _kernel(prior: Any) -> Kernel | None:
    """Return the kernel of a Gaussian process, or None for any other prior."""
    return prior.kernel if isinstance(prior, GaussianProcess) else None
