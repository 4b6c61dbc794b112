r"""Expectations of logistic functions of a Gaussian variable, to rounding, for all means and variances.

The logistic function is a scale mixture of normal distribution functions,

.. math::

    \sigma(x) = \int_0^\infty \Phi\Big(\frac{x}{2k}\Big)\, q(k)\, dk ,

with the density q of the Kolmogorov distribution.  In log k the integrand decays doubly exponentially on both sides, so that
the trapezoidal rule with 24 nodes is exact to rounding in double precision.  Expectations of :math:`\Phi` over
:math:`f \sim N(m, v)` have closed forms, with :math:`\tau_i^2 = v + 4 k_i^2` for each node.

Source: Andrews and Mallows (1974), "Scale mixtures of normal distributions", section 3.
"""

import math
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["expected_logistic", "expected_softplus"]

_NUM_NODES, _FIRST, _LAST = 24, 0.18, 4.2


def expected_softplus(mean: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    r"""Compute ``E[log(1 + eᶠ)]`` for ``f ~ N(mean, variance)``, as ``Σ_i w_i [m Φ(m / τ_i) + τ_i φ(m / τ_i)]``.

    :param mean: means.
    :param variance: variances, zero allowed.

    >>> expected_softplus(torch.zeros(2), torch.tensor([0.0, 1e4]))  # log 2, and 100 / √(2π)
    tensor([ 0.6931, 39.9008])
    """
    z, tau, weights = _standardised(mean, variance)
    return (weights * tau * (z * torch.special.ndtr(z) + _normal_density(z))).sum(0)


def expected_logistic(
    mean: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"]
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Compute expectations of the logistic function and of its derivative, ``E[σ(f)]`` and ``E[σ(f) (1 − σ(f))]``.

    :param mean: means.
    :param variance: variances, zero allowed.

    >>> expected_logistic(torch.zeros(1), torch.zeros(1))
    (tensor([0.5000]), tensor([0.2500]))
    """
    z, tau, weights = _standardised(mean, variance)
    return (weights * torch.special.ndtr(z)).sum(0), (weights * _normal_density(z) / tau).sum(0)


def _standardised(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standardised means z and scales τ, and weights, along a new first dimension of nodes."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    column = (-1,) + (1,) * mean.dim()
    nodes, weights = (torch.as_tensor(x, dtype=mean.dtype, device=mean.device).view(column) for x in _nodes())
    tau = (variance + 4.0 * nodes.square()).sqrt()
    return mean / tau, tau, weights


def _normal_density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)


@cache
def _nodes() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes k and weights of the trapezoidal rule in log k, as Python floats."""
    step = math.log(_LAST / _FIRST) / (_NUM_NODES - 1)
    nodes = [_FIRST * math.exp(i * step) for i in range(_NUM_NODES)]
    weights = [k * _kolmogorov_density(k) for k in nodes]
    return tuple(nodes), tuple(weight / sum(weights) for weight in weights)


def _kolmogorov_density(k: float) -> float:
    """Density of the Kolmogorov distribution, by the one of two series that converges fast."""
    if k < 1.0:
        squares = [(j * math.pi) ** 2 for j in (1, 3, 5, 7)]
        return math.sqrt(2.0 * math.pi) * sum(math.exp(-s / (8.0 * k**2)) * (s / (4.0 * k**4) - k**-2) for s in squares)
    return 8.0 * k * sum((-1) ** (j - 1) * j**2 * math.exp(-2.0 * (j * k) ** 2) for j in range(1, 8))
