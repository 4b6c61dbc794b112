"""Normal variables under a monotone transformation of each column: warped Gaussian processes."""

import math
from functools import cached_property

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import Transform

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.validation import check_values

__all__ = ["WarpedNormal", "YeoJohnsonTransform"]

_POWERS = (-2.0, 4.0)
_LARGEST_NODE, _STEP = 6.0, 0.15  # in standard deviations, and of the rule for moments
_MAX_SIZE = 2**18  # values at the nodes that are in memory at once


class YeoJohnsonTransform(Transform):
    r"""Standardisation and power transformation of each column, linear outside the range of the data.

    With the standardised datum s, the function is

    .. math::

        g(s) = \begin{cases} ((s + 1)^\lambda - 1) / \lambda & s \ge 0 \\
                             -((1 - s)^{2 - \lambda} - 1) / (2 - \lambda) & s < 0 \end{cases}

    with limits :math:`\log(s + 1)` for :math:`\lambda = 0` and :math:`-\log(1 - s)` for :math:`\lambda = 2`, standardised
    again.  Below the smallest and above the largest datum it continues linearly, with the slope at that datum or the slope of
    the standardisation if this is larger, so that the inverse does not grow faster than linearly in standard deviations.

    :param powers: :math:`\lambda` of each column.
    :param shift: column means.
    :param scale: column standard deviations.
    :param limits: smallest and largest standardised datum of each column.
    :param moments: mean and standard deviation of g(s) of each column.

    >>> skewed = torch.randn(200, 2, dtype=torch.float64).exp()
    >>> warp = YeoJohnsonTransform.from_data(skewed)
    >>> t = warp(skewed)
    >>> torch.allclose(warp.inv(t), skewed), bool(((t - t.mean(0)) ** 3).mean(0).abs().max() < 0.5)
    (True, True)

    Source: Yeo and Johnson (2000), "A new family of power transformations to improve normality or symmetry".
    """

    domain = constraints.real
    codomain = constraints.real
    bijective = True
    sign = 1

    @checks_types
    def __init__(
        self,
        powers: Float[Tensor, " D"],
        shift: Float[Tensor, " D"],
        scale: Float[Tensor, " D"],
        limits: tuple[Float[Tensor, " D"], Float[Tensor, " D"]],
        moments: tuple[Float[Tensor, " D"], Float[Tensor, " D"]],
    ):
        super().__init__()
        self.powers, self.shift, self.scale, self.limits, self.moments = powers, shift, scale, limits, moments

    @classmethod
    def from_data(cls, Y: Float[Tensor, "N D"]) -> "YeoJohnsonTransform":
        """Estimate the parameters of each column by maximum likelihood.

        The powers are at least -2 and at most 4.  Columns that do not vary are only shifted.

        :param Y: data, NaN where missing.
        :raises ValueError: for infinite entries, or rows or columns without observed entries.
        """
        check_values(Y, name="Y")
        shift, varies = Y.nanmean(0), Y.double().nan_to_num(-torch.inf).amax(0) > Y.double().nan_to_num(torch.inf).amin(0)
        scale = torch.where(varies, (Y - shift).square().nanmean(0).sqrt(), 1.0)
        s = (Y - shift) / scale
        limits = s.nan_to_num(torch.inf).amin(0), s.nan_to_num(-torch.inf).amax(0)
        powers = torch.ones_like(shift)
        if varies.any():
            from sklearn.preprocessing import PowerTransformer  # imported where it is used, since scikit-learn takes a second

            fitted = PowerTransformer(standardize=False).fit(s[:, varies].double().numpy(force=True))
            powers[varies] = torch.as_tensor(fitted.lambdas_).clamp(*_POWERS).to(Y)
        g = _yeo_johnson(s, powers)
        mean = g.nanmean(0)
        return cls(powers, shift, scale, limits, (mean, torch.where(varies, (g - mean).square().nanmean(0).sqrt(), 1.0)))

    @cached_property
    def _range(self) -> tuple[Tensor, Tensor]:
        """Values of g at the limits."""
        low, high = (self._within(s) for s in self.limits)
        return low, high

    @cached_property
    def _slopes(self) -> tuple[Tensor, Tensor]:
        """Slopes in s outside the limits."""
        low, high = (self._slope_within(s).clamp_min(1.0) for s in self.limits)
        return low, high

    def _slope_within(self, s: Tensor) -> Tensor:
        return torch.where(s >= 0.0, (s + 1.0) ** (self.powers - 1.0), (1.0 - s) ** (1.0 - self.powers)) / self.moments[1]

    def _within(self, s: Tensor) -> Tensor:
        return (_yeo_johnson(s, self.powers) - self.moments[0]) / self.moments[1]

    def _call(self, x):
        s = (x - self.shift) / self.scale
        (low, high), (slope_low, slope_high) = self.limits, self._slopes
        below, above = (s - low).clamp_max(0.0), (s - high).clamp_min(0.0)
        return self._within(torch.minimum(torch.maximum(s, low), high)) + slope_low * below + slope_high * above

    def _inverse(self, y):
        (low, high), (slope_low, slope_high) = self._range, self._slopes
        below, above = (y - low).clamp_max(0.0), (y - high).clamp_min(0.0)
        g = torch.minimum(torch.maximum(y, low), high) * self.moments[1] + self.moments[0]
        s = _inverse_yeo_johnson(g, self.powers) + below / slope_low + above / slope_high
        return self.shift + self.scale * s

    def log_abs_det_jacobian(self, x, y):
        s = (x - self.shift) / self.scale
        (low, high), (slope_low, slope_high) = self.limits, self._slopes
        slope = self._slope_within(torch.minimum(torch.maximum(s, low), high))
        return (torch.where(s < low, slope_low, torch.where(s > high, slope_high, slope)) / self.scale).log()


def _yeo_johnson(s: Tensor, powers: Tensor) -> Tensor:
    upper, lower = _box_cox(1.0 + s.clamp_min(0.0), powers), _box_cox(1.0 - s.clamp_max(0.0), 2.0 - powers)
    return torch.where(s >= 0.0, upper, -lower) + 0.0 * s  # NaN where s is


def _inverse_yeo_johnson(g: Tensor, powers: Tensor) -> Tensor:
    upper = _inverse_box_cox(g.clamp_min(0.0), powers) - 1.0
    lower = 1.0 - _inverse_box_cox(-g.clamp_max(0.0), 2.0 - powers)
    return torch.where(g >= 0.0, upper, lower)


def _box_cox(x: Tensor, power: Tensor) -> Tensor:
    log = x.log()
    return torch.where(power.abs() < 1e-6, log, (power * log).expm1() / torch.where(power == 0.0, 1.0, power))


def _inverse_box_cox(z: Tensor, power: Tensor) -> Tensor:
    log1p = (power * z).clamp_min(-1.0 + 1e-12).log1p()
    return torch.where(power.abs() < 1e-6, z, log1p / torch.where(power == 0.0, 1.0, power)).exp()


class WarpedNormal(dist.TorchDistribution):
    r"""Distribution of y with :math:`g(y) \sim \sum_j \pi_j N(m, (f_j s)^2 + e^2)`, for an increasing g of each column.

    With one factor f = 1 this is the predictive distribution of a warped Gaussian process; several factors make its tails
    heavier.  Mean and variance are computed by the trapezoidal rule, with 27 nodes for one factor, and 57 for factors from 0.5
    to 5 together.  If there are errors each factor has 27 nodes.

    :param loc: m, of shape ``[*batch, D]``, the batch shape.
    :param scale: standard deviations s before the transformation.
    :param warp: g, such as a :class:`YeoJohnsonTransform`.
    :param factors: f; 1 if None.
    :param weights: probabilities π of the factors; equal if None.
    :param error: known standard deviations e of errors, which factors do not multiply; 0 if None.

    >>> warp = YeoJohnsonTransform.from_data(torch.randn(100, 2).exp())
    >>> y = WarpedNormal(torch.zeros(5, 2), torch.ones(5, 2), warp)
    >>> y.batch_shape, y.mean.shape, y.log_prob(torch.ones(5, 2)).shape
    (torch.Size([5, 2]), torch.Size([5, 2]), torch.Size([5, 2]))

    Source: Snelson, Ghahramani and Rasmussen (2004), "Warped Gaussian processes".
    """

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False
    support = constraints.real

    @checks_types
    def __init__(
        self,
        loc: Float[Tensor, "*batch D"],
        scale: Float[Tensor, "*batch D"],
        warp: Transform,
        factors: Float[Tensor, " J"] | None = None,
        weights: Float[Tensor, " J"] | None = None,
        error: Float[Tensor, "*#batch #D"] | None = None,
    ):
        self.error = error
        self.loc, self.scale, self.warp = loc, scale, warp
        self.factors = torch.ones_like(loc[..., 0].flatten()[:1]) if factors is None else factors
        self.weights = torch.ones_like(self.factors) / len(self.factors) if weights is None else weights
        super().__init__(loc.shape, validate_args=False)

    def log_prob(self, value):
        t = self.warp(value)
        parts = [
            weight.log() + dist.Normal(self.loc, self._stddev(factor)).log_prob(t)
            for factor, weight in zip(self.factors, self.weights, strict=True)
        ]
        return torch.stack(parts).logsumexp(0) + self.warp.log_abs_det_jacobian(value, t)

    def _stddev(self, factors: Tensor) -> Tensor:
        """Standard deviations before the transformation."""
        scaled = factors * self.scale
        return scaled if self.error is None else torch.hypot(scaled, self.error.expand_as(self.scale))

    def sample(self, sample_shape=()):
        shape = torch.Size(sample_shape) + self.batch_shape
        uniform = torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device)
        chosen = torch.bucketize(uniform, self.weights.to(uniform).cumsum(0)[:-1].contiguous())
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.warp.inv(self.loc + self._stddev(self.factors[chosen]) * noise)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(self.factors[:1])
        if self.error is None:  # all factors multiply one scale, so that they have nodes together
            rules = [(one, *_nodes_of_mixture(self.factors, self.weights))]
        else:
            nodes, shares = _nodes_of_mixture(one, one)
            rules = [(factor, nodes, weight * shares) for factor, weight in zip(self.factors, self.weights, strict=True)]
        first = second = torch.zeros_like(self.loc)
        centre = self.warp.inv(self.loc)
        number = max(_MAX_SIZE // max(self.loc.numel(), 1), 1)
        for factor, nodes, shares in rules:
            stddev = self._stddev(factor.to(self.loc))
            for node, share in zip(nodes.to(self.loc).split(number), shares.to(self.loc).split(number), strict=True):
                deviation = self.warp.inv(self.loc + node.reshape(-1, *[1] * self.loc.dim()) * stddev) - centre
                first = first + torch.tensordot(share, deviation, 1)
                second = second + torch.tensordot(share, deviation.square(), 1)
        return centre + first, (second - first.square()).clamp_min(0.0)

    @property
    def mean(self):
        return self._moments[0]

    @property
    def variance(self):
        return self._moments[1]


def _nodes_of_mixture(factors: Float[Tensor, " J"], weights: Float[Tensor, " J"]) -> tuple[Tensor, Tensor]:
    r"""Nodes and shares of the trapezoidal rule for :math:`\sum_j \pi_j N(0, f_j^2)`.

    The nodes are :math:`u = 2 f_{\min} \sinh \tau` with equal steps of τ: dense near zero for small factors, and far apart in
    the tails of large ones.  The slope of the inverse transformation jumps at the limits of the data, where Gauss–Hermite
    quadrature is not accurate.

    :param factors: standard deviations f.
    :param weights: probabilities π.
    """
    width, largest = 2.0 * factors.min(), _LARGEST_NODE * factors.max()
    limit = torch.asinh(largest / width).item()
    number = 2 * math.ceil(limit / _STEP) + 1
    tau = torch.linspace(-limit, limit, number, dtype=torch.float64, device=factors.device)
    nodes = width * tau.sinh()
    density = (dist.Normal(0.0, factors.double()).log_prob(nodes[:, None]).exp() * weights).sum(-1) * tau.cosh()
    return nodes, density / density.sum()
