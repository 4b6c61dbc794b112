"""Normal-inverse-Wishart factors of the means and covariances of Gaussian components."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp.ops.linalg import solve_lower

__all__ = [
    "NormalInverseWishart",
    "normal_inverse_wishart",
    "normal_inverse_wishart_kl",
    "normal_log_likelihood",
]


class NormalInverseWishart(NamedTuple):
    r"""Normal-inverse-Wishart distribution in parameters that are affine in its natural parameters.

    :math:`\Sigma \sim \mathrm{IW}(\Psi, \nu)` and :math:`\mu \mid \Sigma \sim N(m, \Sigma / \kappa)`.  Ψ is computed as a
    difference of the parameters: centre data whose mean is many standard deviations from zero.  In Pyro, :math:`\Sigma^{-1}`
    has the distribution ``Wishart(dof, precision_matrix=scale)``.

    :param kappa_mean: κ m.
    :param kappa: κ, the equivalent number of observations of the mean.
    :param scatter: Ψ + κ m mᵀ.
    :param dof: ν > Q − 1.

    >>> prior = NormalInverseWishart.of(torch.ones(2), torch.tensor(0.5), torch.eye(2), torch.tensor(3.0))
    >>> prior.mean, prior.scale
    (tensor([1., 1.]), tensor([[1., 0.],
            [0., 1.]]))
    """

    kappa_mean: Float[Tensor, "*batch Q"]
    kappa: Float[Tensor, "*batch"]
    scatter: Float[Tensor, "*batch Q Q"]
    dof: Float[Tensor, "*batch"]

    @classmethod
    def of(
        cls,
        mean: Float[Tensor, "*#batch Q"],
        kappa: Float[Tensor, "*#batch"],
        scale: Float[Tensor, "*#batch Q Q"],
        dof: Float[Tensor, "*#batch"],
    ) -> "NormalInverseWishart":
        """Create the distribution from m, κ, Ψ and ν.

        :param mean: location m.
        :param kappa: κ.
        :param scale: Ψ.
        :param dof: ν.
        """
        batch = torch.broadcast_shapes(mean.shape[:-1], kappa.shape, scale.shape[:-2], dof.shape)
        kappa_mean = (kappa[..., None] * mean).expand(*batch, -1)
        return cls(kappa_mean, kappa.expand(batch), scale + _outer(kappa_mean, mean), dof.expand(batch))

    @property
    def mean(self) -> Float[Tensor, "*batch Q"]:
        """Mean m of μ."""
        return self.kappa_mean / self.kappa[..., None]

    @property
    def scale(self) -> Float[Tensor, "*batch Q Q"]:
        """Scale matrix Ψ; the mean of Σ⁻¹ is ν Ψ⁻¹."""
        return self.scatter - _outer(self.kappa_mean, self.mean)


@names_types
def normal_inverse_wishart(
    prior: NormalInverseWishart,
    responsibilities: Float[Tensor, "*#batch L C"],
    mean: Float[Tensor, "*#batch L Q"],
    covariance: Float[Tensor, "*#batch L Q Q"] | None = None,
) -> NormalInverseWishart:
    r"""Update the means and covariances of C components, given responsibilities for points :math:`x_l \sim N(m_l, S_l)`.

    .. math::

        \kappa_c = \kappa_0 + \sum_l \phi_{lc}, \quad
        \kappa_c m_c = \kappa_0 m_0 + \sum_l \phi_{lc} m_l, \quad
        \Psi_c + \kappa_c m_c m_c^T = \Psi_0 + \kappa_0 m_0 m_0^T + \sum_l \phi_{lc} (S_l + m_l m_l^T), \quad
        \nu_c = \nu_0 + \sum_l \phi_{lc}

    :param prior: prior of each component [C], or one for all.
    :param responsibilities: responsibilities φ.
    :param mean: means of the points, or the points themselves.
    :param covariance: covariances of the points; None if they are known.
    :returns: the components, with batch shape ``[*batch, C]``.

    Source: Bishop (2006), eqs. 10.60 to 10.63, with moments of points in place of points.

    >>> prior = NormalInverseWishart.of(torch.zeros(1), torch.tensor(1.0), torch.eye(1), torch.tensor(2.0))
    >>> normal_inverse_wishart(prior, torch.ones(3, 1), torch.full((3, 1), 4.0)).mean
    tensor([[3.]])
    """
    counts = responsibilities.sum(-2)
    second = _outer(mean, mean) if covariance is None else covariance + _outer(mean, mean)
    return NormalInverseWishart(
        prior.kappa_mean + responsibilities.mT @ mean,
        prior.kappa + counts,
        prior.scatter + torch.einsum("...lc,...lij->...cij", responsibilities, second),
        prior.dof + counts,
    )


@names_types
def normal_log_likelihood(
    components: NormalInverseWishart,
    mean: Float[Tensor, "*#batch L Q"],
    covariance: Float[Tensor, "*#batch L Q Q"] | None = None,
) -> Float[Tensor, "*batch L C"]:
    r"""Compute the expected log likelihood :math:`E \log N(x_l; \mu_c, \Sigma_c)` of points :math:`x_l \sim N(m_l, S_l)`,

    .. math::

        \tfrac12 E \log|\Sigma_c^{-1}| - \tfrac{Q}{2} \log 2\pi - \tfrac{Q}{2 \kappa_c}
        - \tfrac{\nu_c}{2} \big( (m_l - m_c)^T \Psi_c^{-1} (m_l - m_c) + \mathrm{tr}\, \Psi_c^{-1} S_l \big) .

    :param components: components of batch shape ``[*batch, C]``.
    :param mean: means of the points, or the points themselves.
    :param covariance: covariances of the points; None if they are known.

    Source: Bishop (2006), eqs. 10.64 and 10.65.

    >>> unit = NormalInverseWishart.of(torch.zeros(1, 1), torch.ones(1) * 1e6, torch.eye(1)[None] * 1e6, torch.ones(1) * 1e6)
    >>> normal_log_likelihood(unit, torch.zeros(1, 1))  # log N(0; 0, 1)
    tensor([[-0.9189]])
    """
    LPsi = _factorise(components)
    LPsi_inv_diff = solve_lower(LPsi, (mean.unsqueeze(-3) - components.mean.unsqueeze(-2)).mT)
    squares = LPsi_inv_diff.square().sum(-2).mT
    if covariance is not None:
        squares = squares + torch.einsum("...cij,...lij->...lc", torch.cholesky_inverse(LPsi), covariance)
    Q = mean.shape[-1]
    # E log|Σ⁻¹|
    log_precision = _multivariate_digamma(components.dof, Q) + Q * math.log(2.0) - _log_det(LPsi)
    constant = 0.5 * log_precision - 0.5 * Q * (math.log(2.0 * math.pi) + 1.0 / components.kappa)
    return constant.unsqueeze(-2) - 0.5 * components.dof.unsqueeze(-2) * squares


@names_types
def normal_inverse_wishart_kl(q: NormalInverseWishart, p: NormalInverseWishart) -> Float[Tensor, "*batch"]:
    """Compute ``KL(q ‖ p)``, the KL of the covariances plus the expected KL of the means given the covariances.

    :param q: first argument.
    :param p: second argument.

    >>> prior = NormalInverseWishart.of(torch.zeros(2), torch.tensor(1.0), torch.eye(2), torch.tensor(3.0))
    >>> normal_inverse_wishart_kl(prior, prior)
    tensor(0.)
    """
    Lq, Lp, Q = _factorise(q), _factorise(p), q.scatter.shape[-1]
    ratio = p.kappa / q.kappa
    squares = solve_lower(Lq, (q.mean - p.mean)[..., None]).square().sum((-2, -1))
    means = 0.5 * (Q * (ratio - 1.0 - ratio.log()) + p.kappa * q.dof * squares)
    # ½ ν_q tr(Ψ_p Ψ_q⁻¹) − ½ ν_q Q − ½ ν_p log|Ψ_p| − log Γ_Q(ν_q/2) + …
    trace = solve_lower(Lq, Lp).square().sum((-2, -1))
    log_det = _log_det(Lq) - _log_det(Lp)
    normaliser = torch.mvlgamma(0.5 * p.dof, Q) - torch.mvlgamma(0.5 * q.dof, Q)
    digamma = _multivariate_digamma(q.dof, Q)
    covariances = 0.5 * ((q.dof - p.dof) * digamma + q.dof * (trace - Q) + p.dof * log_det) + normaliser
    return means + covariances


def _factorise(components: NormalInverseWishart) -> Float[Tensor, "*batch Q Q"]:
    """Compute the Cholesky factor of Ψ."""
    return safe_cholesky(components.scale, jitter=0.0, name="scale of a normal-inverse-Wishart distribution")


def _log_det(L: Float[Tensor, "*batch Q Q"]) -> Float[Tensor, "*batch"]:
    """Compute ``log|L Lᵀ|``."""
    return 2.0 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _multivariate_digamma(dof: Float[Tensor, "*batch"], Q: int) -> Float[Tensor, "*batch"]:
    """Compute ``Σ_i ψ((ν + 1 − i) / 2)``, the derivative of ``log Γ_Q(ν/2)`` in ν/2."""
    return torch.digamma(0.5 * (dof[..., None] - torch.arange(Q, dtype=dof.dtype, device=dof.device))).sum(-1)


def _outer(a: Float[Tensor, "*#batch Q"], b: Float[Tensor, "*#batch Q"]) -> Float[Tensor, "*batch Q Q"]:
    return a[..., :, None] * b[..., None, :]
