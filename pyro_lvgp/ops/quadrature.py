"""Quadrature over a Gaussian variable: pure tensor functions."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["clustered_nodes", "gauss_hermite", "log_expectation_at_mode", "log_expectation_derivatives", "normal_nodes"]

Derivatives = Callable[[Tensor], tuple[Tensor, Tensor]]
_NUM_STEPS, _LARGEST_MODE = 15, 1e18
_CLOSE = 0.1  # steps to a mode, in units of its width, after which Newton's method converges
_FARTHEST, _NARROWEST = 16.0, 1e-9  # of points at which nodes cluster
_END = 7.75  # standard deviations, where a normal density is 30 nats below its maximum


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


def log_expectation_at_mode(
    function: Callable[[Tensor], Tensor],
    derivatives: Derivatives,
    mean: Float[Tensor, "*#batch"],
    variance: Float[Tensor, "*#batch"],
    bend: Float[Tensor, "*#batch"],
    *,
    num_points: int = 48,
) -> Float[Tensor, "*batch"]:
    r"""Compute ``log E[exp g(f)]`` for ``f ~ N(mean, variance)`` and a concave g, by adaptive quadrature.

    The nodes of :func:`clustered_nodes` are centred at the mode :math:`\hat z` of :math:`N(z; 0, 1) \exp g(m + \sigma z)`.
    They cluster at the mode and at the bend of ``g``, as closely as the curvature at the mode and a scale of 1 of f demand:

    .. math::

        \log \sum_k \Delta_k\, N(z_k; 0, 1) \exp g(m + \sigma z_k).

    ``exp g`` may be narrow and far from the mean, or a step that is narrow beside the standard deviation of f.

    :param function: ``g``, elementwise.
    :param derivatives: first two derivatives of ``g``, elementwise.
    :param mean: means.
    :param variance: variances, zero allowed.
    :param bend: values of f near which the slope of ``g`` changes within a distance of about 1.  They place nodes only.
    :param num_points: number of nodes.

    Source: Liu and Pierce (1994), "A note on Gauss-Hermite quadrature", for the mode; Trefethen and Weideman (2014), "The
    exponentially convergent trapezoidal rule".

    >>> narrow = lambda f: -50.0 * (f - 3.0).square()
    >>> derivatives = lambda f: (-100.0 * (f - 3.0), torch.full_like(f, -100.0))
    >>> log_expectation_at_mode(narrow, derivatives, torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([3.0]))
    tensor([-6.7630])
    """
    mean, variance, bend = torch.broadcast_tensors(mean, variance, bend)
    sd = _square_root(variance)
    with torch.no_grad():
        z, log_weights = _nodes_at_mode(derivatives, mean, sd, bend, num_points)
    return torch.logsumexp(log_weights + function(mean + sd * z), 0)


@torch.no_grad()
def log_expectation_derivatives(
    function: Callable[[Tensor], Tensor],
    derivatives: Derivatives,
    mean: Float[Tensor, "*#batch"],
    variance: Float[Tensor, "*#batch"],
    bend: Float[Tensor, "*#batch"],
    *,
    num_points: int = 48,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""Compute ``log E[exp g(f)]``, and its first and second derivative in the mean, at the nodes of one quadrature.

    With expectations over the density proportional to :math:`N(f; m, v) \exp g(f)`, and :math:`f = m + \sigma z`,

    .. math::

        \partial_m \log E[e^g] = E\,g' = E z / \sigma, \qquad
        \partial_m^2 \log E[e^g] = \operatorname{Var} g' + E\,g'' = (\operatorname{Var} z - 1) / \sigma^2 .

    The first form of each keeps its digits where :math:`-v\,E\,g'' < 1`, and the second elsewhere.  The results have no
    gradients.

    :param function: ``g``, elementwise.
    :param derivatives: first two derivatives of ``g``, elementwise.
    :param mean: means.
    :param variance: variances, zero allowed.
    :param bend: as for :func:`log_expectation_at_mode`.
    :param num_points: number of nodes.
    :returns: the value and the derivatives.

    Source: integration by parts under a normal density (Stein, 1981, "Estimation of the mean of a multivariate normal
    distribution").

    >>> normal = lambda f: -0.5 * f.square()
    >>> derivatives = lambda f: (-f, torch.full_like(f, -1.0))
    >>> zero, one, three = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([3.0])
    >>> log_expectation_derivatives(normal, derivatives, one, three, zero)  # -log(1 + v) / 2 - m**2 / (2 (1 + v)), ...
    (tensor([-0.8181]), tensor([-0.2500]), tensor([-0.2500]))
    """
    mean, variance, bend = torch.broadcast_tensors(mean, variance, bend)
    sd = _square_root(variance)
    z, log_weights = _nodes_at_mode(derivatives, mean, sd, bend, num_points)
    f = mean + sd * z
    log_terms = log_weights + function(f)
    value = torch.logsumexp(log_terms, 0)
    weights = torch.exp(log_terms - value)
    first, second = derivatives(f)
    slope, curvature, middle = ((weights * x).sum(0) for x in (first, second, z))
    by_z = variance * curvature < -1.0
    by_function = (weights * (first - slope).square()).sum(0) + curvature
    by_node = ((weights * (z - middle).square()).sum(0) - 1.0) / sd.square()
    return value, torch.where(by_z, middle / sd, slope), torch.where(by_z, by_node, by_function)


def _nodes_at_mode(derivatives: Derivatives, mean: Tensor, sd: Tensor, bend: Tensor, num_points: int) -> tuple[Tensor, Tensor]:
    """Nodes z of a standard normal variable along a new first dimension, and the logarithms of their weights."""
    mode, width = _mode(derivatives, mean, sd, bend)
    offset = (bend - mean) / sd - mode
    z, spacing = clustered_nodes(offset.clamp(max=0.0), offset.clamp(min=0.0), width.minimum(1.0 / sd), num_points)
    z = mode + z
    return z, spacing.log() - 0.5 * (z.square() + math.log(2.0 * math.pi))


def clustered_nodes(
    low: Float[Tensor, "*#batch"], high: Float[Tensor, "*#batch"], width: Float[Tensor, "*#batch"], num_points: int
) -> tuple[Float[Tensor, "num_points *batch"], Float[Tensor, "num_points *batch"]]:
    r"""Compute nodes of the trapezoidal rule between ±7.75 that cluster at two points.

    The rule is applied to u with

    .. math::

        2 u = \operatorname{arsinh} \frac{z - a}{w} + \operatorname{arsinh} \frac{z - b}{w}, \qquad
        z = \frac{a + b}{2} + w \tanh u \sqrt{\cosh^2 u + \delta^2}, \quad \delta = \frac{b - a}{2 w},

    so that distances of neighbours are proportional to w near a and b, and to the distance from a and b elsewhere.  For
    integrands that vary on the scale w near both points and decay like a normal density, the rule converges exponentially.

    :param low: a, limited to ±16.
    :param high: b ≥ a, limited to ±16.
    :param width: w, limited to [1e-9, 1].
    :param num_points: number of nodes.
    :returns: nodes z and their distances dz / du · Δu.

    Source: Trefethen and Weideman (2014), "The exponentially convergent trapezoidal rule"; the substitution for one point is
    that of Johnston and Elliott (2005), "A sinh transformation for evaluating nearly singular boundary element integrals".

    >>> z, spacing = clustered_nodes(torch.tensor(-1.0), torch.tensor(1.0), torch.tensor(0.01), 64)
    >>> (spacing * torch.exp(-0.5 * z.square())).sum().square()  # 2 π
    tensor(6.2832)
    """
    low, high, width = torch.broadcast_tensors(low.clamp(-_FARTHEST, _FARTHEST), high.clamp(-_FARTHEST, _FARTHEST), width)
    width = width.clamp(_NARROWEST, 1.0)
    first, last = (0.5 * (torch.asinh((z - low) / width) + torch.asinh((z - high) / width)) for z in (-_END, _END))
    share = torch.linspace(0.0, 1.0, num_points, dtype=low.dtype, device=low.device).view(-1, *(1 for _ in low.shape))
    u, delta2 = first + share * (last - first), (0.5 * (high - low) / width).square()
    growth = u.exp()
    cosh = 0.5 * (growth + growth.reciprocal())
    cosh2 = cosh.square()
    root = (cosh2 + delta2).sqrt()
    z = 0.5 * (low + high) + width * (growth / cosh - 1.0) * root  # tanh u = eᵘ / cosh u − 1
    return z, width * (cosh2 + delta2 / cosh2) / root * (last - first) / (num_points - 1)


def _nodes_along_first_dim(mean: Tensor, variance: Tensor, num_points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and standard deviation, broadcast, and nodes and weights along a new first dimension."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    column = (-1,) + (1,) * mean.dim()
    nodes, weights = (torch.as_tensor(v, dtype=mean.dtype, device=mean.device).view(column) for v in normal_nodes(num_points))
    return mean, _square_root(variance), nodes, weights


def _square_root(variance: Tensor) -> Tensor:
    """Square root with a finite gradient at zero, by a floor far below rounding."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


@torch.no_grad()
def _mode(derivatives: Derivatives, mean: Tensor, sd: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and width of N(z; 0, 1) exp g(mean + sd z), by Newton steps from a guess, and bisections of arsinh z."""

    def slope(z: Tensor) -> tuple[Tensor, Tensor]:
        first, second = derivatives(mean + sd * z)
        return sd * first - z, sd.square() * second - 1.0

    # The slope decreases at a rate of 1 at least, so that the mode is between 0 and the slope at 0.
    first, _ = slope(torch.zeros_like(mean))
    low, high = first.clamp(-_LARGEST_MODE, 0.0), first.clamp(0.0, _LARGEST_MODE)
    start = (guess - mean) / sd
    first, second = slope(start)
    z = (start - first / second).clamp(low, high)
    first, second = slope(z)
    for step in range(_NUM_STEPS):
        low, high = torch.where(first > 0.0, z, low), torch.where(first < 0.0, z, high)
        newton = z - first / second
        is_close = (newton - z).abs() <= _CLOSE * (-second).rsqrt()
        by_newton = (newton >= low) & (newton <= high) & (is_close | (step % 3 != 2))
        z = torch.where(by_newton, newton, _bisection(low, high))
        first, second = slope(z)
    return z, (-second).rsqrt()


def _bisection(low: Tensor, high: Tensor) -> Tensor:
    """Compute sinh((arsinh a + arsinh b) / 2) as (a + b) / (2 cosh((arsinh a − arsinh b) / 2)), between a and b."""
    cosh = ((1.0 + low.square()).sqrt() * (1.0 + high.square()).sqrt() - low * high).clamp_min(1.0)
    return ((low + high) * (2.0 * (cosh + 1.0)).rsqrt()).maximum(low).minimum(high)
