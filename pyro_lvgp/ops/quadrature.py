"""Integrals over a Gaussian variable: pure tensor functions."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Derivatives = Callable[[Tensor], tuple[Tensor, Tensor]]
_NUM_HALVINGS, _FARTHEST = 15, 1e4
_NEGLIGIBLE = 30.0  # nats below the largest


@lru_cache
def _nodes(num_points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes and weights for a standard normal: ``x = √2 t``, ``w / √π``."""
    t, w = np.polynomial.hermite.hermgauss(num_points)
    return tuple(np.sqrt(2.0) * t), tuple(w / np.sqrt(np.pi))


def gauss_hermite(
    function: Callable[[Tensor], Tensor],
    mean: Float[Tensor, "*#batch"],
    variance: Float[Tensor, "*#batch"],
    *,
    num_points: int = 20,
    log: bool = False,
) -> Float[Tensor, "*batch"]:
    """``E[g(f)]`` for ``f ~ N(mean, variance)``; with ``log``, ``log E[exp g(f)]``.

    Exact for polynomials of degree up to ``2 num_points − 1``.  The nodes run along a new first dimension.

    :param function: ``g``, elementwise.
    :param mean: means.
    :param variance: variances, zero allowed.
    :param num_points: number of nodes.
    :param log: average ``exp g`` and return the logarithm, without overflow.

    >>> gauss_hermite(torch.square, torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([3.])
    """
    mean, sd, nodes, weights = _prepared(mean, variance, num_points)
    values = function(mean + sd * nodes)
    if log:
        return torch.logsumexp(values + weights.log(), 0)
    return (weights * values).sum(0)


def log_gauss_hermite_at_mode(
    function: Callable[[Tensor], Tensor],
    derivatives: Derivatives,
    mean: Float[Tensor, "*#batch"],
    variance: Float[Tensor, "*#batch"],
    *,
    num_points: int = 20,
) -> Float[Tensor, "*batch"]:
    r"""``log E[exp g(f)]`` for ``f ~ N(mean, variance)`` and a concave g, which may be narrow and far from the mean.

    Nodes lie about the mode :math:`\hat z` of :math:`N(z; 0, 1) \exp g(m + \sigma z)`, as wide as its curvature tells:

    .. math::

        \log \sum_k w_k\, e^{x_k^2 / 2}\, s\, e^{-z_k^2 / 2} \exp g(m + \sigma z_k), \qquad z_k = \hat z + s x_k.

    :param function: ``g``, elementwise.
    :param derivatives: its first two derivatives.
    :param mean: means.
    :param variance: variances, zero allowed.
    :param num_points: number of nodes.

    Source: Liu and Pierce (1994), "A note on Gauss-Hermite quadrature".

    >>> narrow = lambda f: -50.0 * (f - 3.0).square()
    >>> slopes = lambda f: (-100.0 * (f - 3.0), torch.full_like(f, -100.0))
    >>> log_gauss_hermite_at_mode(narrow, slopes, torch.tensor([0.0]), torch.tensor([1.0]))
    tensor([-6.7630])
    """
    mean, sd, x, weights = _prepared(mean, variance, num_points)
    mode, width = _mode(derivatives, mean.detach(), sd.detach())
    z = mode + width * x
    return torch.logsumexp(weights.log() + 0.5 * (x.square() - z.square()) + width.log() + function(mean + sd * z), 0)


def log_student_t_plus_normal(
    deviation: Float[Tensor, "*#batch"],
    scale: Float[Tensor, "*#batch"],
    df: float,
    variance: Float[Tensor, "*#batch"],
    *,
    num_points: int = 80,
) -> Float[Tensor, "*batch"]:
    r"""Log density of a sum of a t and a Gaussian variable, both about zero.

    The t is a mixture of Gaussians over precisions :math:`g \sim \mathrm{Gamma}(\nu / 2, \nu / 2)`:

    .. math::

        \log \int N(r;\, 0,\, v + s^2 / g)\, \mathrm{Gamma}(g;\, \nu / 2,\, \nu / 2)\, dg .

    In log g the integrand is smooth and falls off on both sides, so that the trapezoidal rule converges exponentially fast,
    however narrow the t is beside the Gaussian, and however far out r is.

    :param deviation: the sum r.
    :param scale: s of the t.
    :param df: its degrees of freedom ν.
    :param variance: v of the Gaussian, zero allowed.
    :param num_points: number of nodes, between the ends beyond which nothing counts.

    Source: Andrews and Mallows (1974), "Scale mixtures of normal distributions"; Trefethen and Weideman (2014), "The
    exponentially convergent trapezoidal rule".

    >>> zero = torch.zeros(1)
    >>> log_student_t_plus_normal(zero, torch.ones(1), 4.0, zero), torch.distributions.StudentT(4.0).log_prob(zero)
    (tensor([-0.9808]), tensor([-0.9808]))
    """
    r2, s2, v = torch.broadcast_tensors(deviation.square(), scale.square(), variance)
    half = 0.5 * df
    with torch.no_grad():
        # Right of 1 and left of where r would have g it falls as exp(−ν/2 (e^|x| − 1 − |x|)) and exp(−ν/2 |x|) do, or faster.
        farthest = _NEGLIGIBLE / half + math.sqrt(2.0 * _NEGLIGIBLE / half)
        low, high = -torch.log1p(r2 / (df * s2)) - farthest, math.log1p(farthest)
        share = torch.linspace(0.0, 1.0, num_points, dtype=r2.dtype, device=r2.device).view(-1, *(1 for _ in r2.shape))
        log_g, step = low + share * (high - low), (high - low) / (num_points - 1)
    total = v + s2 * torch.exp(-log_g)
    log_gamma = half * (log_g - log_g.expm1()) + half * (math.log(half) - 1.0) - math.lgamma(half)  # of log g
    log_normal = -0.5 * (r2 / total + total.log() + math.log(2.0 * math.pi))
    return torch.logsumexp(log_gamma + log_normal, 0) + step.log()


def _prepared(mean: Tensor, variance: Tensor, num_points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and standard deviation, broadcast, and nodes and weights along a new first dimension."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    column = (-1,) + (1,) * mean.dim()
    nodes, weights = (torch.as_tensor(v, dtype=mean.dtype, device=mean.device).view(column) for v in _nodes(num_points))
    # The square root has no gradient at zero: a floor far below rounding keeps it finite.
    return mean, variance.clamp_min(torch.finfo(mean.dtype).tiny).sqrt(), nodes, weights


@torch.no_grad()
def _mode(derivatives: Derivatives, mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and width of N(z; 0, 1) exp g(mean + sd z), by halving the interval and Newton's steps in turns."""

    def slope(z: Tensor) -> tuple[Tensor, Tensor]:
        first, second = derivatives(mean + sd * z)
        return sd * first - z, sd.square() * second - 1.0

    # The slope falls at a rate of 1 at least, so that it vanishes between 0 and its value there.
    z, (first, second) = torch.zeros_like(mean), slope(torch.zeros_like(mean))
    low, high = first.clamp(-_FARTHEST, 0.0), first.clamp(0.0, _FARTHEST)
    for step in range(2 * _NUM_HALVINGS):
        newton = z - first / second
        inside = (newton >= low) & (newton <= high) & (step % 2 == 1)
        z = torch.where(inside, newton, 0.5 * (low + high))
        first, second = slope(z)
        low, high = torch.where(first > 0.0, z, low), torch.where(first < 0.0, z, high)
    return z, (-second).rsqrt()
