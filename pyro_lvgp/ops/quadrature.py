"""Quadrature over a Gaussian variable: pure tensor functions."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["gauss_hermite", "log_gauss_hermite_at_mode", "log_student_t_plus_normal", "normal_nodes"]

Derivatives = Callable[[Tensor], tuple[Tensor, Tensor]]
_NUM_HALVINGS, _LARGEST_MODE = 15, 1e4
_NEGLIGIBLE = 30.0  # nats below the maximum of an integrand


@lru_cache
def normal_nodes(num_points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    r"""Nodes and weights of Gauss-Hermite quadrature for a standard normal variable.

    The nodes are the roots of the orthonormal Hermite polynomial :math:`h_n`, found from the largest down by Newton's method
    with deflation; the weights are :math:`1 / \sum_{k < n} h_k(x)^2`.  Both are Python floats, so that the constants do not
    depend on a device, a dtype, or the tracing of tensor operations.

    :param num_points: number of nodes n.
    :returns: nodes in increasing order, and their weights.

    Source: Golub and Welsch (1969), "Calculation of Gauss quadrature rules", for the weights.

    >>> normal_nodes(2)
    ((-1.0, 1.0), (0.5, 0.5))
    """
    positive: list[float] = []
    x = math.sqrt(4.0 * num_points + 2.0)  # above all roots: Newton's method with deflation decreases to the next root
    for _ in range(num_points // 2):
        root = _newton(_newton(x, num_points, positive), num_points, [])
        positive.append(root)
        x = (1.0 - 1e-4) * root
    middle = [0.0] if num_points % 2 else []
    nodes = [-x for x in positive] + middle + positive[::-1]
    return tuple(nodes), tuple(1.0 / sum(h * h for h in _hermite(x, num_points)[:-1]) for x in nodes)


def _hermite(x: float, degree: int) -> list[float]:
    """Orthonormal Hermite polynomials of degrees 0 to ``degree``, by their recursion."""
    values = [1.0, x]
    for k in range(1, degree):
        values.append((x * values[k] - math.sqrt(k) * values[k - 1]) / math.sqrt(k + 1.0))
    return values[: degree + 1]


def _newton(x: float, degree: int, roots: list[float]) -> float:
    """Find a root of a Hermite polynomial divided by the factors of known roots and their negatives."""
    for _ in range(100):
        *_, lower, value = _hermite(x, degree)
        slope = math.sqrt(degree) * lower - value * sum(2.0 * x / (x * x - root * root) for root in roots)
        step = value / slope
        x -= step
        if abs(step) <= 1e-15 * abs(x):
            break
    return x


def gauss_hermite(
    function: Callable[[Tensor], Tensor],
    mean: Float[Tensor, "*#batch"],
    variance: Float[Tensor, "*#batch"],
    *,
    num_points: int = 20,
    log: bool = False,
) -> Float[Tensor, "*batch"]:
    """Compute the expectation ``E[g(f)]`` for ``f ~ N(mean, variance)`` by Gauss-Hermite quadrature.

    The result is exact for polynomials of degree up to ``2 num_points − 1``.  ``g`` is called with the nodes along a new first
    dimension.

    :param function: ``g``, elementwise.
    :param mean: means.
    :param variance: variances, zero allowed.
    :param num_points: number of nodes.
    :param log: compute ``log E[exp g(f)]`` instead, without overflow.

    >>> gauss_hermite(torch.square, torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([3.])
    """
    mean, sd, nodes, weights = _nodes_along_first_dim(mean, variance, num_points)
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
    r"""Compute ``log E[exp g(f)]`` for ``f ~ N(mean, variance)`` and a concave g, by adaptive quadrature.

    The nodes are centred at the mode :math:`\hat z` of :math:`N(z; 0, 1) \exp g(m + \sigma z)` and scaled by the curvature at
    the mode, so that ``exp g`` may be narrow and far from the mean:

    .. math::

        \log \sum_k w_k\, e^{x_k^2 / 2}\, s\, e^{-z_k^2 / 2} \exp g(m + \sigma z_k), \qquad z_k = \hat z + s x_k.

    :param function: ``g``, elementwise.
    :param derivatives: first two derivatives of ``g``, elementwise.
    :param mean: means.
    :param variance: variances, zero allowed.
    :param num_points: number of nodes.

    Source: Liu and Pierce (1994), "A note on Gauss-Hermite quadrature".

    >>> narrow = lambda f: -50.0 * (f - 3.0).square()
    >>> derivatives = lambda f: (-100.0 * (f - 3.0), torch.full_like(f, -100.0))
    >>> log_gauss_hermite_at_mode(narrow, derivatives, torch.tensor([0.0]), torch.tensor([1.0]))
    tensor([-6.7630])
    """
    mean, sd, x, weights = _nodes_along_first_dim(mean, variance, num_points)
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
    r"""Compute the log density of the sum of a Student-t and a Gaussian variable, both of mean zero.

    The t distribution is a mixture of Gaussians over precisions :math:`g \sim \mathrm{Gamma}(\nu / 2, \nu / 2)`:

    .. math::

        \log \int N(r;\, 0,\, v + s^2 / g)\, \mathrm{Gamma}(g;\, \nu / 2,\, \nu / 2)\, dg .

    In log g the integrand is smooth and decays on both sides, so that the trapezoidal rule converges exponentially fast, for
    all ratios of the scales and all r.

    :param deviation: the sum r.
    :param scale: scale s of the t distribution.
    :param df: degrees of freedom ν of the t distribution.
    :param variance: v of the Gaussian, zero allowed.
    :param num_points: number of nodes in the range in which the integrand is not negligible.

    Source: Andrews and Mallows (1974), "Scale mixtures of normal distributions"; Trefethen and Weideman (2014), "The
    exponentially convergent trapezoidal rule".

    >>> zero = torch.zeros(1)
    >>> log_student_t_plus_normal(zero, torch.ones(1), 4.0, zero), torch.distributions.StudentT(4.0).log_prob(zero)
    (tensor([-0.9808]), tensor([-0.9808]))
    """
    r2, s2, v = torch.broadcast_tensors(deviation.square(), scale.square(), variance)
    half = 0.5 * df
    with torch.no_grad():
        # At a distance x to the right of log g = 0 the integrand decays at least as fast as exp(−ν/2 (e^x − 1 − x)), and at a
        # distance x to the left of log g = −log(1 + r²/(ν s²)) as exp(−ν/2 x).
        farthest = _NEGLIGIBLE / half + math.sqrt(2.0 * _NEGLIGIBLE / half)
        low, high = -torch.log1p(r2 / (df * s2)) - farthest, math.log1p(farthest)
        share = torch.linspace(0.0, 1.0, num_points, dtype=r2.dtype, device=r2.device).view(-1, *(1 for _ in r2.shape))
        log_g, step = low + share * (high - low), (high - low) / (num_points - 1)
    total = v + s2 * torch.exp(-log_g)
    log_gamma = half * (log_g - log_g.expm1()) + half * (math.log(half) - 1.0) - math.lgamma(half)  # of log g
    log_normal = -0.5 * (r2 / total + total.log() + math.log(2.0 * math.pi))
    return torch.logsumexp(log_gamma + log_normal, 0) + step.log()


def _nodes_along_first_dim(mean: Tensor, variance: Tensor, num_points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and standard deviation, broadcast, and nodes and weights along a new first dimension."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    column = (-1,) + (1,) * mean.dim()
    nodes, weights = (torch.as_tensor(v, dtype=mean.dtype, device=mean.device).view(column) for v in normal_nodes(num_points))
    # The square root has no gradient at zero: a floor far below rounding makes the gradient finite.
    return mean, variance.clamp_min(torch.finfo(mean.dtype).tiny).sqrt(), nodes, weights


@torch.no_grad()
def _mode(derivatives: Derivatives, mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and width of N(z; 0, 1) exp g(mean + sd z), by alternating bisection and Newton steps."""

    def slope(z: Tensor) -> tuple[Tensor, Tensor]:
        first, second = derivatives(mean + sd * z)
        return sd * first - z, sd.square() * second - 1.0

    # The slope decreases at a rate of 1 at least, so that the mode is between 0 and the slope at 0.
    z, (first, second) = torch.zeros_like(mean), slope(torch.zeros_like(mean))
    low, high = first.clamp(-_LARGEST_MODE, 0.0), first.clamp(0.0, _LARGEST_MODE)
    for step in range(2 * _NUM_HALVINGS):
        newton = z - first / second
        inside = (newton >= low) & (newton <= high) & (step % 2 == 1)
        z = torch.where(inside, newton, 0.5 * (low + high))
        first, second = slope(z)
        low, high = torch.where(first > 0.0, z, low), torch.where(first < 0.0, z, high)
    return z, (-second).rsqrt()
