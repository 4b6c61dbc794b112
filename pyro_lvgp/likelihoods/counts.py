"""Likelihoods of counts and of binary data."""

import math
from abc import abstractmethod

import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_lvgp.likelihoods.base import LogConcaveLikelihood, WithParameter
from pyro_lvgp.ops.logistic import expected_logistic, expected_softplus

__all__ = ["Bernoulli", "Binomial", "Logistic", "NegativeBinomial", "Poisson"]


class _Poisson(dist.Poisson):
    """Poisson distribution with the log density of large counts in double precision."""

    def log_prob(self, value):
        if self._validate_args:
            self._validate_sample(value)
        rate, value = self.rate.double(), value.double()
        # The last term, of each datum, is not computed for every node of a quadrature.
        return (value.xlogy(rate) - rate - (value + 1.0).lgamma()).to(self.rate)


class _Binomial(dist.Binomial):
    """Binomial distribution with the log density of large counts in double precision."""

    def log_prob(self, value):
        if self._validate_args:
            self._validate_sample(value)
        exact = dist.Binomial(self.total_count.double(), logits=self.logits.double(), validate_args=False)
        return exact.log_prob(value.double()).to(self.logits)


class _NegativeBinomial(dist.NegativeBinomial):
    """Negative binomial distribution with the log density of large counts in double precision."""

    def log_prob(self, value):
        if self._validate_args:
            self._validate_sample(value)
        exact = dist.NegativeBinomial(self.total_count.double(), logits=self.logits.double(), validate_args=False)
        return exact.log_prob(value.double()).to(self.logits)


class Logistic(LogConcaveLikelihood):
    """Base class of likelihoods with p(y | f) proportional to ``(eᶠ)ᵃ / (1 + eᶠ)ᵇ``.

    A subclass implements :meth:`exponents` beside :meth:`distribution` and :meth:`inverse_link`.  The derivatives and the
    expected log likelihood follow from the exponents.  The latter has no error of quadrature, for any variance of f.  A
    :class:`~pyro_lvgp.models.RandomFeatureLVM` can marginalise its weights in the Pólya-gamma bound.

    :param num_points: number of quadrature nodes per entry, for the log predictive density; 48 by default.

    >>> class Geometric(Logistic):  # p(y) = eᶠ / (1 + eᶠ)ʸ⁺¹
    ...     def distribution(self, f, params):
    ...         return dist.Geometric(logits=f)
    ...
    ...     def inverse_link(self, y):
    ...         return -torch.log(y + 0.5)
    ...
    ...     def exponents(self, y, params):
    ...         return torch.ones_like(y), y + 1.0
    >>> y = torch.tensor([0.0, 3.0])
    >>> Geometric().log_prob_derivatives(y, torch.zeros(2), None)
    (tensor([ 0.5000, -1.0000]), tensor([-0.2500, -1.0000]))
    """

    @abstractmethod
    def exponents(
        self, y: Float[Tensor, "*batch"], params: Tensor | None
    ) -> tuple[Float[Tensor, "*#batch"], Float[Tensor, "*#batch"]]:
        """Compute the exponents a and b of each entry; to be implemented by subclasses.

        :param y: data in the support.
        :param params: the tensor that :meth:`~pyro_lvgp.likelihoods.Likelihood.params` returns.
        """

    def expected_log_prob(self, y, mean, variance, params):
        a, b, at_zero = self._terms(y, params)
        mean64, variance64 = torch.broadcast_tensors(mean.double(), variance.double())
        expected = at_zero + a * mean64 - b * (expected_softplus(mean64, variance64) - math.log(2.0))
        return expected.to(mean)

    def log_prob_derivatives(self, y, f, params):
        (a, b), p = self.exponents(y, params), f.sigmoid()
        return a - b * p, -b * p * (1.0 - p)

    def _log_prob_of(self, y, params):
        a, b, at_zero = self._terms(y, params)  # once for all nodes of a quadrature

        def log_prob(f: Tensor) -> Tensor:
            f64 = f.double()
            return (at_zero + a * f64 + b * (logsigmoid(-f64) + math.log(2.0))).to(f)

        return log_prob

    def _terms(self, y: Tensor, params: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Exponents a and b, and log p(y | 0), for ``log p(y | f) = log p(y | 0) + a f − b (log(1 + eᶠ) − log 2)``.

        They have double precision: in single precision the terms of large counts would cancel to several nats.
        """
        y, params = y.double(), None if params is None else params.double()
        return *self.exponents(y, params), self.distribution(torch.zeros_like(y), params).log_prob(y)

    def _bend(self, y, params):
        a, b = self.exponents(y, params)
        return torch.log((a + 0.5) / (b - a + 0.5))


class Bernoulli(Logistic):
    """Bernoulli likelihood with logistic link, ``y ~ Bernoulli(1 / (1 + e⁻ᶠ))``, y in {0, 1}.

    >>> Bernoulli()(torch.zeros(2)).probs
    tensor([0.5000, 0.5000])
    """

    def support_text(self):
        return "0 or 1"

    def distribution(self, f, params):
        return dist.Bernoulli(logits=f)

    def moments(self, mean, variance, params):
        p, _ = expected_logistic(mean, variance)
        q, _ = expected_logistic(-mean, variance)
        return p, p * q

    def inverse_link(self, y):
        return torch.logit((y + 0.5) / 2.0)

    def exponents(self, y, params):
        return y, torch.ones_like(y)


class Binomial(Logistic):
    """Binomial likelihood with logistic link, ``y ~ Binomial(n, 1 / (1 + e⁻ᶠ))``, y in {0, …, n}.

    :param total_count: n, one for all outputs or one for each [D].
    :param num_points: number of quadrature nodes per entry, for the log predictive density; 48 by default.
    :raises ValueError: if a ``total_count`` is no whole number of 1 or more.
    :raises TypeError: for a truth value.

    >>> Binomial(10)(torch.zeros(2)).mean
    tensor([5., 5.])
    """

    def __init__(self, total_count: int | Tensor, *, num_points: int | None = None):
        super().__init__(num_points=num_points)
        if isinstance(total_count, bool):
            raise TypeError(f"expected a whole number as total_count, got {total_count}")
        count = torch.as_tensor(total_count, dtype=torch.get_default_dtype())
        if not ((count >= 1) & (count == count.round())).all():
            raise ValueError(f"expected whole numbers of 1 or more as total_count, got {count.tolist()}")
        self.register_buffer("total_count", count)

    def support_text(self):
        first, *others = self.total_count.unique().long().tolist()
        largest = f"total_count, {self.total_count.long().tolist()} by column" if others else first
        return f"integers from 0 to {largest}"

    def distribution(self, f, params):
        return _Binomial(self.total_count, logits=f)

    def moments(self, mean, variance, params):
        # Var y = n E[p (1 − p)] + n² Var p, and Var p = E p (1 − E p) − E[p (1 − p)], whose terms may be nearly equal.
        mean64, variance64 = mean.double(), variance.double()
        (p, spread), (q, _) = expected_logistic(mean64, variance64), expected_logistic(-mean64, variance64)
        y_variance = self.total_count * (spread + self.total_count * (p * q - spread).clamp_min(0.0))
        return (self.total_count * p).to(mean), y_variance.to(mean)

    def inverse_link(self, y):
        return torch.logit((y + 0.5) / (self.total_count + 1.0))

    def exponents(self, y, params):
        return y, self.total_count

    def check_outputs(self, data_dim, params):
        super().check_outputs(data_dim, params)
        shape = self.total_count.shape
        if shape not in ((), (1,), (data_dim,)):
            raise ValueError(
                f"expected one total_count, or one for each of {data_dim} outputs, got {list(shape)} of them; a "
                "count of each row would be unknown for new rows: pass one number, or a tensor with one for each column"
            )


class Poisson(LogConcaveLikelihood):
    """Poisson likelihood with log link, ``y ~ Poisson(eᶠ)``, y in {0, 1, …}.

    >>> Poisson()(torch.zeros(2)).rate
    tensor([1., 1.])
    """

    has_log_link = True

    def support_text(self):
        return "counts 0, 1, …"

    def distribution(self, f, params):
        # For an infinite rate y log(rate) − rate is NaN.  The margin of 1 keeps exp from overflowing by rounding.
        return _Poisson(f.clamp(max=math.log(torch.finfo(f.dtype).max) - 1.0).exp())

    def inverse_link(self, y):
        return torch.log(y + 0.5)

    def log_prob_derivatives(self, y, f, params):
        rate = f.exp()
        return y - rate, -rate

    def expected_log_prob(self, y, mean, variance, params):
        y64, mean64, variance64 = (x.double() for x in (y, mean, variance))  # the terms of large counts cancel
        return (y64 * mean64 - (mean64 + 0.5 * variance64).exp() - torch.lgamma(y64 + 1.0)).to(mean)

    def moments(self, mean, variance, params):
        rate = (mean + 0.5 * variance).exp()
        return rate, rate + rate.square() * variance.expm1()


class NegativeBinomial(WithParameter, Logistic):
    """Negative binomial likelihood ``p(y | f) = Γ(y+r) / (y! Γ(r)) (eᶠ)ʸ / (1+eᶠ)^(y+r)``.

    Counts y have mean ``r eᶠ`` and variance ``r eᶠ (1 + eᶠ)``.

    :param dispersion: initial r; for large r the likelihood is nearly Poisson.  ``initialize`` of our models estimates r from
        the data unless the parameter is frozen, since an optimisation with a much too small initial r can converge to
        uninformative latents.
    :param data_dim: number of outputs, for an r of each output; None shares one.
    :param num_points: number of quadrature nodes per entry, for the log predictive density; 48 by default.

    The attribute ``dispersion`` is a ``PyroParam`` of shape [] or [data_dim].

    >>> NegativeBinomial(10.0)(torch.zeros(1)).mean.detach()
    tensor([10.])
    """

    has_log_link = True

    def support_text(self):
        return "counts 0, 1, …"

    def __init__(self, dispersion: float | Tensor = 10.0, *, data_dim: int | None = None, num_points: int | None = None):
        super().__init__("dispersion", dispersion, data_dim, num_points=num_points)

    def distribution(self, f, params):
        return _NegativeBinomial(params, logits=f)

    def inverse_link(self, y):
        return torch.log((y + 0.5) / self.params().detach())

    def exponents(self, y, params):
        return y, y + params

    def moments(self, mean, variance, params):
        odds = (mean + 0.5 * variance).exp()
        return params * odds, params * (odds + odds.square() * (variance.exp() + params * variance.expm1()))

    @torch.no_grad()
    def init_from_data(self, y, f):
        """Match moments: ``Σ (y − m)² = Σ m + Σ m² / r`` with means m in proportion to eᶠ.

        r is at most 30 times the mean count, and at most 10⁴.  For larger r the likelihood hardly changes, but natural
        gradients converge slowly, since f = log m − log r is far from zero.

        :param y: data, NaN where missing.
        :param f: approximate log means.
        """
        if self._param_name in self._pyro_samples or not all(parameter.requires_grad for parameter in self.parameters()):
            return
        observed = ~torch.isnan(y)
        y, m = torch.nan_to_num(y), f.exp().masked_fill(~observed, 0.0)
        m = m * (y.sum(0) / m.sum(0))
        sums = torch.stack([m.square().sum(0), ((y - m).square() - m).sum(0), y.sum(0), observed.to(y).sum(0)])
        square, excess, total, number = sums if self._per_output else sums.sum(-1)
        largest = (30.0 * total / number).clamp(1.0, 1e4)
        self.dispersion = torch.where(excess > 0.0, square / excess, torch.inf).minimum(largest).to(self.params())
