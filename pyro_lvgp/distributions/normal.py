"""Multivariate normals with known noise or given precisions, and their divergences."""

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, register_kl

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp.ops.linalg import invert_lower

__all__ = ["DrawnNormal", "PrecisionNormal", "PrecisionNormalAtMean", "without_independent"]


def _by_factor(function: Callable[[Tensor, Tensor], Tensor], factor: Tensor, x: Tensor) -> Tensor:
    """Apply a function to each factor and the rows of x that belong to it; all rows at once for a common factor."""
    if factor.dim() > 2 and factor.shape[-3] == 1:
        return function(factor.squeeze(-3), x)
    return function(factor, x.unsqueeze(-2)).squeeze(-2)


class DrawnNormal(dist.MultivariateNormal):
    r"""``MultivariateNormal`` that caches the noise of its last draw, for a fast and exact log density at that draw.

    At :math:`x = m + L \epsilon` the log density is :math:`-\tfrac12 \epsilon^T \epsilon - \log|L| - \tfrac{D}{2} \log 2\pi`.
    Solving for ε instead costs more, and its rounding errors for nearly singular L have misleading gradients.  A batch with
    one common L is drawn by a single matrix product.

    >>> q = DrawnNormal(torch.zeros(2), scale_tril=torch.eye(2))
    >>> x = q.rsample()
    >>> bool((q.log_prob(x) - q.log_prob(x.clone())).abs() < 1e-5)
    True
    """

    _draw: Tensor | None = None
    _noise: Tensor

    def rsample(self, sample_shape=()):
        self._noise = torch.randn(self.shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        self._draw = self.loc + _by_factor(lambda L, rows: rows @ L.mT, self._unbroadcasted_scale_tril, self._noise)
        return self._draw

    def log_prob(self, value):
        if value is not self._draw:
            return super().log_prob(value)
        half_log_det = self._unbroadcasted_scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * (self._noise.square() + math.log(2.0 * math.pi)).sum(-1) - half_log_det


@register_kl(MultivariateNormal, Independent)
def _kl_mvn_independent(q, p):
    """Compute KL(N(m, S) ‖ Π N(μ_i, τ_i²)) = ½ Σ_i [ (S_ii + (m_i−μ_i)²)/τ_i² + log τ_i² − 1 ] − ½ log|S|."""
    if not isinstance(p.base_dist, Normal) or p.reinterpreted_batch_ndims != 1:
        raise NotImplementedError
    precision = p.base_dist.variance.reciprocal()
    quadratic = (q.variance + (q.loc - p.base_dist.loc).square()) * precision
    half_log_det = q.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return 0.5 * (quadratic - precision.log() - 1.0).sum(-1) - half_log_det


class PrecisionNormal(dist.TorchDistribution):
    """Multivariate normal ``N(loc, P⁻¹)`` given the Cholesky factor of P, which may be common to a batch.

    No analytic KL is registered.  If the distribution is the exact posterior given the other sites,
    ``log p(y | a) + log p(a) − log q(a)`` is the log evidence at every draw of a.  With an analytic KL the estimate would have
    the variance of the likelihood term.

    :param loc: means ``[*batch, L]``.
    :param precision_tril: lower-triangular R ``[*#batch, L, L]`` with ``P = R Rᵀ``.

    >>> PrecisionNormal(torch.zeros(1), torch.full((1, 1), 2.0)).variance
    tensor([0.2500])
    """

    arg_constraints = {"loc": constraints.real_vector, "precision_tril": constraints.lower_cholesky}  # noqa: RUF012
    support = constraints.real_vector
    has_rsample = True

    @checks_types
    def __init__(self, loc: Tensor, precision_tril: Tensor, validate_args: bool | None = None):
        self.loc, self.precision_tril = loc, precision_tril
        batch_shape = torch.broadcast_shapes(loc.shape[:-1], precision_tril.shape[:-2])
        super().__init__(batch_shape, loc.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape, _instance=None):
        return PrecisionNormal(self.loc.expand(*batch_shape, -1), self.precision_tril, validate_args=False)

    @property
    def mean(self):
        return self.loc.expand(self.shape())

    @property
    def variance(self):
        return invert_lower(self.precision_tril).square().sum(-2).expand(self.shape())

    @property
    def multivariate_normal(self) -> dist.MultivariateNormal:
        """``MultivariateNormal`` with the same mean and covariance, which has an analytic KL."""
        return dist.MultivariateNormal(self.loc, precision_matrix=self.precision_tril @ self.precision_tril.mT)

    def rsample(self, sample_shape=()):
        noise = torch.randn(self.shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + _by_factor(
            partial(torch.linalg.solve_triangular, upper=False, left=False), self.precision_tril, noise
        )

    def log_prob(self, value):
        white = _by_factor(lambda R, rows: rows @ R, self.precision_tril, value - self.mean)
        return self._log_peak() - 0.5 * white.square().sum(-1)

    def _log_peak(self) -> Tensor:
        """Compute the log density at the mean."""
        L = self.loc.shape[-1]
        return self.precision_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * L * math.log(2.0 * math.pi)


class PrecisionNormalAtMean(PrecisionNormal):
    """:class:`PrecisionNormal` whose draws are all equal to its mean, for bounds that do not depend on the draw.

    If the distribution is the exact posterior given the other sites, ``log p(y | a) + log p(a) − log q(a)`` and its gradients
    are the same at every a.  At the mean, which is detached, log q(a) costs no matrix product and has no gradient in the mean.
    """

    def expand(self, batch_shape, _instance=None):
        return PrecisionNormalAtMean(self.loc.expand(*batch_shape, -1), self.precision_tril, validate_args=False)

    @cached_property
    def _detached_mean(self) -> Tensor:
        return self.mean.detach()

    def rsample(self, sample_shape=()):
        return self._detached_mean.expand(self.shape(sample_shape)) if sample_shape else self._detached_mean

    def log_prob(self, value):
        if value is self._detached_mean:
            return self._log_peak().expand(self.batch_shape)
        return super().log_prob(value)


def without_independent(fn: Any, *, masks: bool = False) -> Any:
    """Return the base distribution of nested ``to_event`` calls.

    :param fn: a distribution.
    :param masks: remove ``mask(...)`` as well.

    >>> without_independent(dist.Normal(torch.zeros(2), 1.0).mask(False).to_event(1), masks=True)
    Normal(loc: torch.Size([2]), scale: torch.Size([2]))
    """
    while isinstance(fn, Independent) or (masks and isinstance(fn, MaskedDistribution)):
        fn = fn.base_dist
    return fn
