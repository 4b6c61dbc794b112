"""Student-t densities of a Gaussian variable: pure tensor functions, by mixtures over precisions."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["expected_log_student_t", "log_student_t_plus_normal", "log_student_t_plus_normal_derivatives"]

_LOG_FARTHEST_OUTLIER = 10.0  # log(1 + r²/(ν s²)) up to which nodes are close enough for full accuracy
_FIRST, _LAST = -11.0, math.log(40.0)  # of log t, where the gap's integrand is of the order e^2u, and of exp(-e^u)


def expected_log_student_t(
    deviation: Float[Tensor, "*#batch"],
    scale: Float[Tensor, "*#batch"],
    df: float,
    variance: Float[Tensor, "*#batch"],
    *,
    num_points: int = 48,
) -> Float[Tensor, "*batch"]:
    r"""Compute the expected log density of a Student-t variable around a Gaussian location, ``E log t_ν(r; x, s)``.

    For :math:`x \sim N(0, v)`, with :math:`a^2 = \nu s^2` and :math:`A = a^2 + r^2 + v`,

    .. math::

        E \log\Big(1 + \frac{(r - x)^2}{a^2}\Big) = \log \frac{A}{a^2} - \int_0^\infty \Big[
            \frac{e^{-t (a^2 + r^2 / k) / A}}{\sqrt k} - e^{-t} \Big] \frac{dt}{t}, \qquad k = 1 + 2 t v / A ,

    since :math:`\log z = \int (e^{-t} - e^{-t z})\, dt / t`.  The integral is the gap of Jensen's inequality.  In log t its
    integrand is smooth, and decays like t² on the left since A is the mean of :math:`a^2 + (r - x)^2`.  The trapezoidal rule
    therefore converges exponentially fast, for all ratios of the scales and all r.

    :param deviation: r, the datum minus the mean of its location.
    :param scale: scale s of the t distribution.
    :param df: degrees of freedom ν of the t distribution.
    :param variance: v of the location, zero allowed.
    :param num_points: number of nodes.

    Source: Frullani's integral; Trefethen and Weideman (2014), "The exponentially convergent trapezoidal rule".

    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> expected_log_student_t(one, one, 4.0, zero), torch.distributions.StudentT(4.0).log_prob(one)
    (tensor([-1.5387]), tensor([-1.5387]))
    """
    r2, a2, v = torch.broadcast_tensors(deviation.square(), df * scale.square(), variance)
    A = a2 + r2 + v
    with torch.no_grad():
        last = _LAST + (A / a2).log()
        share = torch.linspace(0.0, 1.0, num_points, dtype=A.dtype, device=A.device).view(-1, *(1 for _ in A.shape))
        t, step = torch.exp(_FIRST + share * (last - _FIRST)), (last - _FIRST) / (num_points - 1)
    x = t * (v / A)
    k = 1.0 + 2.0 * x
    half_log_k = 0.5 * torch.log1p(2.0 * x)
    larger = torch.exp(-t * (a2 + r2 / k) / A - half_log_k)
    excess = x - half_log_k + 2.0 * t * x * (r2 / (A * k))  # of its logarithm over -t; not negative
    gap = step * (larger * -torch.expm1(-excess)).sum(0)
    half = 0.5 * (df + 1.0)
    log_constant = math.lgamma(half) - math.lgamma(0.5 * df) - 0.5 * math.log(math.pi)
    return log_constant - 0.5 * a2.log() - half * (torch.log1p((r2 + v) / a2) - gap)


def log_student_t_plus_normal(
    deviation: Float[Tensor, "*#batch"],
    scale: Float[Tensor, "*#batch"],
    df: float,
    variance: Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch"]:
    r"""Compute the log density of the sum of a Student-t and a Gaussian variable, both of mean zero.

    The t distribution is a mixture of Gaussians over precisions :math:`g \sim \mathrm{Gamma}(\nu / 2, \nu / 2)`:

    .. math::

        \log \int N(r;\, 0,\, v + s^2 / g)\, \mathrm{Gamma}(g;\, \nu / 2,\, \nu / 2)\, dg .

    In log g the integrand is smooth and decays on both sides, so that the trapezoidal rule converges exponentially fast, for
    all ratios of the scales and all r.  Nodes are as close and as many as the rounding error of the dtype demands for
    :math:`|r| < 150 \sqrt \nu\, s`; beyond, distances grow like log r.

    :param deviation: the sum r.
    :param scale: scale s of the t distribution.
    :param df: degrees of freedom ν of the t distribution.
    :param variance: v of the Gaussian, zero allowed.

    Source: Andrews and Mallows (1974), "Scale mixtures of normal distributions"; Trefethen and Weideman (2014), "The
    exponentially convergent trapezoidal rule".

    >>> zero = torch.zeros(1)
    >>> log_student_t_plus_normal(zero, torch.ones(1), 4.0, zero), torch.distributions.StudentT(4.0).log_prob(zero)
    (tensor([-0.9808]), tensor([-0.9808]))
    """
    r2, s2, v = torch.broadcast_tensors(deviation.square(), scale.square(), variance)
    with torch.no_grad():
        log_g, log_weights = _precisions(r2, s2, df)
    total = v + s2 * torch.exp(-log_g)
    return torch.logsumexp(log_weights - 0.5 * (r2 / total + total.log()), 0)


@torch.no_grad()
def log_student_t_plus_normal_derivatives(
    deviation: Float[Tensor, "*#batch"],
    scale: Float[Tensor, "*#batch"],
    df: float,
    variance: Float[Tensor, "*#batch"],
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""Compute :func:`log_student_t_plus_normal` and its first and second derivative in r, at the nodes of one quadrature.

    With :math:`p = (v + s^2 / g)^{-1}`, and expectations over the density of g given r,

    .. math:: \partial_r = -r\, E\,p, \qquad \partial_r^2 = r^2 \operatorname{Var} p - E\,p .

    The results have no gradients.

    :param deviation: the sum r.
    :param scale: scale s of the t distribution.
    :param df: degrees of freedom ν of the t distribution.
    :param variance: v of the Gaussian, zero allowed.
    :returns: the value and the derivatives.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> log_student_t_plus_normal_derivatives(3.0 * one, one, 4.0, zero)  # ..., -(ν + 1) r / (ν s² + r²), ...
    (tensor([-3.9275]), tensor([-1.1538]), tensor([0.1479]))
    """
    r, s, v = torch.broadcast_tensors(deviation, scale, variance)
    r2, s2 = r.square(), s.square()
    log_g, log_weights = _precisions(r2, s2, df)
    precision = (v + s2 * torch.exp(-log_g)).reciprocal()
    log_terms = log_weights - 0.5 * (r2 * precision - precision.log())
    value = torch.logsumexp(log_terms, 0)
    weights = torch.exp(log_terms - value)
    mean = (weights * precision).sum(0)
    return value, -r * mean, r2 * (weights * (precision - mean).square()).sum(0) - mean


def _precisions(r2: Tensor, s2: Tensor, df: float) -> tuple[Tensor, Tensor]:
    """Logarithms of precisions g along a new first dimension, and of their weights Gamma(g; ν/2, ν/2) g Δ / √(2 π)."""
    half, nats = 0.5 * df, -math.log(torch.finfo(r2.dtype).eps)
    # At a distance x to the right of log g = 0 the integrand decays at least as fast as exp(−ν/2 (e^x − 1 − x)), and at a
    # distance x to the left of log g = −log(1 + r²/(ν s²)) as exp(−ν/2 x).
    farthest = nats / half + math.sqrt(2.0 * nats / half)
    right = math.log1p(farthest)
    # The trapezoidal rule has an error of exp(−2 π a / Δ) for an integrand that is analytic for imaginary parts below a, here
    # π/2, and of exp(−2 (π σ / Δ)²) for a normal density, here of σ² = 2/ν.
    spacing = min(math.pi**2 / nats, math.pi * math.sqrt(2.0 / (half * nats)))
    num_points = math.ceil((farthest + _LOG_FARTHEST_OUTLIER + right) / spacing) + 1
    left = -torch.log1p(r2 / (df * s2)) - farthest
    share = torch.linspace(0.0, 1.0, num_points, dtype=r2.dtype, device=r2.device).view(-1, *(1 for _ in r2.shape))
    log_g, step = left + share * (right - left), (right - left) / (num_points - 1)
    log_constant = half * (math.log(half) - 1.0) - math.lgamma(half) - 0.5 * math.log(2.0 * math.pi)
    return log_g, half * (log_g - log_g.expm1()) + (step.log() + log_constant)
