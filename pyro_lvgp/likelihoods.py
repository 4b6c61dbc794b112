"""Likelihoods p(y | f): how an observation scatters around a Gaussian-process function."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_lvgp.quadrature import gauss_hermite, log_gauss_hermite_at_mode
from pyro_lvgp.recording import assume


class Likelihood(PyroModule):
    """p(y | f, θ), elementwise over entries.

    You implement ``distribution(f, theta)``, a univariate distribution of the shape of ``f`` [..., N, D], and
    ``function(y)``, a rough inverse of its link; with a parameter of its own, also ``theta()``; with a support that 0 is not
    in, ``stand_in``.  You get expectations over a Gaussian f by quadrature; override what has a closed form.

    :param num_points: quadrature nodes per entry.
    """

    stand_in: ClassVar[float] = 0.0  # what models put where y is missing, before they mask it

    def __init__(self, *, num_points: int = 20):
        super().__init__()
        if num_points < 1:
            raise ValueError(f"expected num_points of 1 or more, got {num_points}; 20 is plenty for smooth likelihoods")
        self.num_points = num_points

    def theta(self) -> Tensor | None:
        """The likelihood's parameter, lined up with [..., N, D]; read it once in a model, since a prior draws at each read."""
        return None

    def distribution(self, f: Float[Tensor, "*batch"], theta: Tensor | None) -> TorchDistributionMixin:
        """p(y | f, θ)."""
        raise NotImplementedError(f"{type(self).__name__} must implement distribution(f, theta)")

    def function(self, y: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """A rough f for each y, to start from."""
        raise NotImplementedError(f"{type(self).__name__} must implement function(y), a rough inverse of its link")

    def slopes(
        self, y: Float[Tensor, "*#batch"], f: Float[Tensor, "*#batch"], theta: Tensor | None
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """First and second derivative of log p(y | f, θ) in f, where that is concave: quadrature then looks where y is.

        Where it is not implemented, quadrature looks where f is, which is enough for a y that tells little of f.
        """
        raise NotImplementedError(f"{type(self).__name__} has no slopes(y, f, theta)")

    def start(self, y: Float[Tensor, "N D"], f: Float[Tensor, "N D"]) -> None:
        """Set what cannot be learned from a poor start, given data and a rough f of each; nothing by default."""

    def forward(self, f: Float[Tensor, "*batch"]) -> TorchDistributionMixin:
        """p(y | f) at the present parameter."""
        return self.distribution(f, self.theta())

    def expected_log_prob(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        theta: Tensor | None,
    ) -> Float[Tensor, "*batch"]:
        """``E[log p(y | f, θ)]`` for ``f ~ N(mean, variance)``, entry by entry."""
        return self._expect(lambda p: p.log_prob(y), mean, variance, theta)

    def log_prob_of_rows(
        self,
        y: Float[Tensor, "N D"],
        observed: Bool[Tensor, "N D"],
        mean: Float[Tensor, "*batch N D"],
        variance: Float[Tensor, "*#batch N #D"] | None,
        theta: Tensor | None,
    ) -> Float[Tensor, "*batch N"]:
        """:meth:`expected_log_prob` summed over what is observed of each row; where f is known, with no ``variance``."""
        if variance is None:
            entries = self.distribution(mean, theta).log_prob(y)
        else:
            entries = self.expected_log_prob(y, mean, variance, theta)
        return torch.where(observed, entries, 0.0).sum(-1)

    def log_marginal(
        self,
        y: Float[Tensor, "*#batch"],
        mean: Float[Tensor, "*#batch"],
        variance: Float[Tensor, "*#batch"],
        theta: Tensor | None,
    ) -> Float[Tensor, "*batch"]:
        """``log E[p(y | f, θ)]`` for ``f ~ N(mean, variance)``, entry by entry."""

        def log_prob(f: Tensor) -> Tensor:
            return self.distribution(f, theta).log_prob(y)

        if type(self).slopes is Likelihood.slopes:
            return gauss_hermite(log_prob, mean, variance, num_points=self.num_points, log=True)
        slopes = partial(self.slopes, y, theta=theta)
        return log_gauss_hermite_at_mode(log_prob, slopes, mean, variance, num_points=self.num_points)

    def moments(
        self, mean: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"], theta: Tensor | None
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Mean and variance of y for ``f ~ N(mean, variance)``, by the laws of total expectation and variance."""
        y_mean = self._expect(lambda p: p.mean, mean, variance, theta)
        # A sum of what is not negative: differences of squares would lose all digits of counts that hardly vary.
        return y_mean, self._expect(lambda p: p.variance + (p.mean - y_mean).square(), mean, variance, theta)

    def support_text(self) -> str:
        """The support of y in words, for errors."""
        return "real numbers"

    def check(self, y: Tensor) -> None:
        """Raise a ``ValueError`` if an observed entry lies outside the support.  NaN is missing and passes."""
        missing = torch.isnan(y)
        bad = ~(self(torch.zeros_like(y)).support.check(torch.nan_to_num(y, self.stand_in)) | missing)
        if bad.any():
            raise ValueError(
                f"{type(self).__name__} likelihood: expected {self.support_text()}, got {y[bad][0].item():g} "
                f"({int(bad.sum())} such entries); recode the data, mark the entries as missing (NaN), or choose "
                "another likelihood"
            )

    def _expect(self, of: Callable[[Any], Tensor], mean: Tensor, variance: Tensor, theta: Tensor | None) -> Tensor:
        return gauss_hermite(lambda f: of(self.distribution(f, theta)), mean, variance, num_points=self.num_points)


def as_likelihood(likelihood: Likelihood | None) -> Likelihood:
    """The likelihood, ``Gaussian()`` if None.

    :raises TypeError: for anything else, such as a name or a class.
    """
    if likelihood is None:
        return Gaussian()
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"expected a likelihood, got {likelihood!r}; make one, such as Gaussian()")
    return likelihood


class _WithParameter(Likelihood):
    """A likelihood with one positive parameter, shared by all outputs or one for each."""

    def __init__(self, name: str, value: float | Tensor, data_dim: int | None, *, num_points: int = 20):
        super().__init__(num_points=num_points)
        value = value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.get_default_dtype())
        if not (value > 0).all():
            raise ValueError(f"expected a positive {name}, got {value.min().item():g}")
        shape = () if data_dim is None else (data_dim,)
        if (value.dim() and value.shape not in ((1,), shape)) or value.dim() > len(shape):
            raise ValueError(
                f"expected one {name}, or data_dim of them, got {list(value.shape)} and data_dim={data_dim}; pass the number "
                "of outputs as data_dim"
            )
        self._theta, self._per_output = name, data_dim is not None
        setattr(self, name, PyroParam(value.expand(shape).clone(), constraints.softplus_positive))

    def theta(self) -> Tensor:
        value = getattr(self, self._theta)
        # [D] lines up with [..., N, D] as it is; a scalar, or a plate's [..., 1], gains the last dimension.
        return value if self._per_output else value[..., None]


class _AdditiveNoise(_WithParameter):
    """Real numbers around f itself: the link is the identity."""

    def check(self, y):
        """Every real number is in the support."""

    def function(self, y):
        return y


class Gaussian(_AdditiveNoise):
    """``y ~ N(f, σ²)``.

    :param variance: initial noise variance σ², in squared units of y.
    :param data_dim: give the number of outputs for a variance of each output; None shares one.

    The attribute ``variance`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.

    >>> Gaussian(0.25)(torch.zeros(3, 2)).variance[0, 0].detach()
    tensor(0.2500)
    """

    def __init__(self, variance: float | Tensor = 0.3, *, data_dim: int | None = None):
        super().__init__("variance", variance, data_dim)

    def distribution(self, f, theta):
        return dist.Normal(f, theta.sqrt())

    def expected_log_prob(self, y, mean, variance, theta):
        # log N(y; mean, θ) − variance / 2θ; what depends on θ alone is computed once, not for every entry.
        return -0.5 * (((y - mean).square() + variance) / theta + (2.0 * math.pi * theta).log())

    def log_prob_of_rows(self, y, observed, mean, variance, theta):
        # Where rows are long, passes over all entries are the cost: few of them, and none for what depends on θ alone.
        theta = torch.atleast_2d(theta)
        theta = theta.expand(*theta.shape[:-1], y.shape[-1])
        log_scale, square = (2.0 * math.pi * theta).log(), (mean - y).square()
        if variance is not None:
            square = square + variance
        if assume(observed.all()):
            log_det = log_scale.sum(-1)
        else:
            log_det, square = (observed.to(theta) @ log_scale.mT).squeeze(-1), torch.where(observed, square, 0.0)
        return -0.5 * ((square @ theta.reciprocal().mT).squeeze(-1) + log_det)

    def log_marginal(self, y, mean, variance, theta):
        return dist.Normal(mean, (variance + theta).sqrt()).log_prob(y)

    def moments(self, mean, variance, theta):
        mean, variance = torch.broadcast_tensors(mean, variance + theta)
        return mean, variance


class LogNormal(_WithParameter):
    """``log y ~ N(f, σ²)``, y positive: f is the logarithm of the median, and noise is in proportion.

    :param variance: initial variance σ² of log y.
    :param data_dim: give the number of outputs for a variance of each output; None shares one.

    The attribute ``variance`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.

    >>> LogNormal(0.5)(torch.zeros(1)).mean.detach()
    tensor([1.2840])
    """

    stand_in = 1.0

    def __init__(self, variance: float | Tensor = 0.3, *, data_dim: int | None = None):
        super().__init__("variance", variance, data_dim)

    def support_text(self):
        return "positive numbers"

    def distribution(self, f, theta):
        return dist.LogNormal(f, theta.sqrt())

    def function(self, y):
        return y.log()

    def expected_log_prob(self, y, mean, variance, theta):
        log_y = y.log()
        return -0.5 * (((log_y - mean).square() + variance) / theta + (2.0 * math.pi * theta).log()) - log_y

    def log_marginal(self, y, mean, variance, theta):
        return dist.LogNormal(mean, (variance + theta).sqrt()).log_prob(y)

    def moments(self, mean, variance, theta):
        y = dist.LogNormal(mean, (variance + theta).sqrt())
        return y.mean, y.variance


class StudentT(_AdditiveNoise):
    """``y ~ t_ν(f, s)``: near f like a Gaussian of standard deviation s, with tails that let single entries be far from it.

    :param scale: initial s, in units of y.
    :param df: degrees of freedom ν, above 2, which are not learned; large ν is nearly Gaussian.
    :param data_dim: give the number of outputs for a scale of each output; None shares one.
    :param num_points: quadrature nodes per entry; give more where f is known less well than to twice the scale.

    The attribute ``scale`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.

    >>> StudentT(0.5)(torch.zeros(1)).variance.detach()
    tensor([0.5000])

    Source: Lange, Little and Taylor (1989), "Robust statistical modeling using the t distribution"; Vanhatalo, Jylänki and
    Vehtari (2009), "Gaussian process regression with Student-t likelihood".
    """

    def __init__(self, scale: float | Tensor = 0.5, *, df: float = 4.0, data_dim: int | None = None, num_points: int = 20):
        super().__init__("scale", scale, data_dim, num_points=num_points)
        if not 2.0 < df < math.inf:
            raise ValueError(
                f"expected df above 2, below which y has no variance, and finite, got {df}; 4 is a common choice, and for no "
                "tails at all there is Gaussian"
            )
        self.df = df

    def distribution(self, f, theta):
        return dist.StudentT(self.df, f, theta)

    def moments(self, mean, variance, theta):
        mean, variance = torch.broadcast_tensors(mean, variance + theta.square() * (self.df / (self.df - 2.0)))
        return mean, variance


class Bernoulli(Likelihood):
    """``y ~ Bernoulli(1 / (1 + e⁻ᶠ))``, y in {0, 1}.

    >>> Bernoulli()(torch.zeros(2)).probs
    tensor([0.5000, 0.5000])
    """

    def support_text(self):
        return "0 or 1"

    def distribution(self, f, theta):
        return dist.Bernoulli(logits=f)

    def function(self, y):
        return torch.logit((y + 0.5) / 2.0)

    def slopes(self, y, f, theta):
        return _logistic_slopes(y, 1.0, f)


class Binomial(Likelihood):
    """``y ~ Binomial(n, 1 / (1 + e⁻ᶠ))``, y in {0, …, n}.

    :param total_count: n, one for all outputs or one for each [D].

    >>> Binomial(10)(torch.zeros(2)).mean
    tensor([5., 5.])
    """

    def __init__(self, total_count: int | Tensor, *, num_points: int = 20):
        super().__init__(num_points=num_points)
        count = torch.as_tensor(total_count, dtype=torch.get_default_dtype())
        if not ((count >= 1) & (count == count.round())).all():
            raise ValueError(f"expected whole numbers of 1 or more as total_count, got {count.tolist()}")
        self.register_buffer("total_count", count)

    def support_text(self):
        return f"integers from 0 to {self.total_count.max().item():g}"

    def distribution(self, f, theta):
        return dist.Binomial(self.total_count, logits=f)

    def function(self, y):
        return torch.logit((y + 0.5) / (self.total_count + 1.0))

    def slopes(self, y, f, theta):
        return _logistic_slopes(y, self.total_count, f)


class Poisson(Likelihood):
    """``y ~ Poisson(eᶠ)``, y in {0, 1, …}.

    >>> Poisson()(torch.zeros(2)).rate
    tensor([1., 1.])
    """

    def support_text(self):
        return "counts 0, 1, …"

    def distribution(self, f, theta):
        return dist.Poisson(f.exp())

    def function(self, y):
        return torch.log(y + 0.5)

    def slopes(self, y, f, theta):
        rate = f.exp()
        return y - rate, -rate

    def expected_log_prob(self, y, mean, variance, theta):
        return y * mean - (mean + 0.5 * variance).exp() - torch.lgamma(y + 1.0)

    def moments(self, mean, variance, theta):
        rate = (mean + 0.5 * variance).exp()
        return rate, rate + rate.square() * variance.expm1()


class NegativeBinomial(_WithParameter):
    """``p(y) = Γ(y+r) / (y! Γ(r)) (eᶠ)ʸ / (1+eᶠ)^(y+r)``: counts with mean ``r eᶠ`` and variance ``r eᶠ (1 + eᶠ)``.

    :param dispersion: initial r; large r is nearly Poisson.  ``initialize`` of our models finds a better one in the data,
        unless the parameter is frozen: from noise that is too wide latents say nothing, and r is not learned any more.
    :param data_dim: give the number of outputs for an r of each output; None shares one.

    The attribute ``dispersion`` is a ``PyroParam`` of shape [] or [data_dim].

    >>> NegativeBinomial(10.0)(torch.zeros(1)).mean.detach()
    tensor([10.])
    """

    def support_text(self):
        return "counts 0, 1, …"

    def __init__(self, dispersion: float | Tensor = 10.0, *, data_dim: int | None = None, num_points: int = 20):
        super().__init__("dispersion", dispersion, data_dim, num_points=num_points)

    def distribution(self, f, theta):
        return dist.NegativeBinomial(theta, logits=f)

    def function(self, y):
        return torch.log((y + 0.5) / self.theta().detach())

    def slopes(self, y, f, theta):
        return _logistic_slopes(y, y + theta, f)

    def moments(self, mean, variance, theta):
        odds = (mean + 0.5 * variance).exp()
        return theta * odds, theta * (odds + odds.square() * (variance.exp() + theta * variance.expm1()))

    @torch.no_grad()
    def start(self, y, f):
        """Match moments: ``Σ (y − m)² = Σ m + Σ m² / r`` with means m in proportion to eᶠ.

        r is 30 times the mean count at most, and 10⁴: beyond it hardly matters, but f = log m − log r would lie so far out
        that natural gradients crawl.
        """
        if self._theta in self._pyro_samples or not all(parameter.requires_grad for parameter in self.parameters()):
            return
        observed = ~torch.isnan(y)
        y, m = torch.nan_to_num(y), f.exp().masked_fill(~observed, 0.0)
        m = m * (y.sum(0) / m.sum(0))
        sums = torch.stack([m.square().sum(0), ((y - m).square() - m).sum(0), y.sum(0), observed.to(y).sum(0)])
        square, excess, total, number = sums if self._per_output else sums.sum(-1)
        most = (30.0 * total / number).clamp(1.0, 1e4)
        self.dispersion = torch.where(excess > 0.0, square / excess, torch.inf).minimum(most).to(self.theta())


def _logistic_slopes(y: Tensor, number: float | Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of y f − n log(1 + eᶠ)."""
    p = f.sigmoid()
    return y - number * p, -number * p * (1.0 - p)
