r"""Pólya-gamma bounds on logistic likelihoods, without Pólya-gamma variables: pure tensor functions.

A likelihood :math:`p(y \mid \psi) = e^{\ell} (e^{\psi})^{a} / (1 + e^{\psi})^{b}` is bounded below by a Gaussian in ψ, which
equals the likelihood at the variational parameters :math:`\psi = \pm c`:

.. math::

    \log p(y \mid \psi) \ge \kappa \psi - \tfrac12 \bar\omega \psi^2
    + \ell - b \log 2 - b \log\cosh \tfrac{c}{2} + \tfrac12 \bar\omega c^2,
    \qquad \kappa = a - \tfrac{b}{2}, \quad \bar\omega = \frac{b}{2c} \tanh\frac{c}{2} .

:math:`\bar\omega` is the mean of :math:`\mathrm{PG}(b, c)`.  The constant contains the divergence of :math:`\mathrm{PG}(b, c)`
from :math:`\mathrm{PG}(b, 0)`.  An entry with a = b = ℓ = 0 is missing.

Source: Polson, Scott and Windle (2013); Jaakkola and Jordan (2000), "Bayesian parameter estimation via variational methods".
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from pyro_lvgp.conjugate.feature_regression import log_partition, weight_posterior

__all__ = [
    "LogisticForm",
    "binomial",
    "collapsed_log_bound",
    "log_offset",
    "negative_binomial",
    "precision",
    "variational_parameter",
]


class LogisticForm(NamedTuple):
    """Exponents and constants of a logistic likelihood.

    :param kappa: a − b/2.
    :param trials: exponent b.
    :param log_constant: ℓ.
    """

    kappa: Float[Tensor, "*batch"]
    trials: Float[Tensor, "*batch"]
    log_constant: Float[Tensor, "*batch"]

    def where(self, observed: Bool[Tensor, "*#batch"]) -> "LogisticForm":
        """Set the entries that are not observed to missing.

        :param observed: mask of the observed entries.
        """
        return LogisticForm(*(torch.where(observed, x, 0.0) for x in self))


def binomial(y: Float[Tensor, "*batch"], total_count: Float[Tensor, "*#batch"]) -> LogisticForm:
    """Compute the form of ``y ~ Binomial(n, 1 / (1 + e^−ψ))``; with n = 1, of the Bernoulli distribution.

    :param y: counts.
    :param total_count: number of trials n.

    >>> binomial(torch.tensor([1.0]), torch.tensor(1.0))
    LogisticForm(kappa=tensor([0.5000]), trials=tensor([1.]), log_constant=tensor([0.]))
    """
    n = total_count.expand(y.shape)
    log_choose = torch.lgamma(n + 1.0) - torch.lgamma(y + 1.0) - torch.lgamma(n - y + 1.0)
    return LogisticForm(y - 0.5 * n, n, log_choose)


def negative_binomial(y: Float[Tensor, "*batch"], dispersion: Float[Tensor, "*#batch"]) -> LogisticForm:
    """Compute the form of ``p(y | ψ) = Γ(y+r) / (y! Γ(r)) (e^ψ)ʸ / (1+e^ψ)^(y+r)``.

    :param y: counts.
    :param dispersion: number of failures r.

    >>> negative_binomial(torch.tensor([2.0]), torch.tensor(4.0))
    LogisticForm(kappa=tensor([-1.]), trials=tensor([6.]), log_constant=tensor([2.3026]))
    """
    log_constant = torch.lgamma(y + dispersion) - torch.lgamma(y + 1.0) - torch.lgamma(dispersion)
    return LogisticForm(0.5 * (y - dispersion), y + dispersion, log_constant)


def precision(trials: Float[Tensor, "*#batch"], c: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """Compute ``ω̄ = b tanh(c/2) / (2c)``, the precision of the Gaussian bound; ``b/4`` at c = 0.

    :param trials: exponent b.
    :param c: variational parameter.

    >>> precision(torch.tensor(1.0), torch.tensor([0.0, 2.0]))
    tensor([0.2500, 0.1904])
    """
    small = c.abs() < 1e-3
    safe = torch.where(small, 1.0, c)
    return trials * torch.where(small, 0.25 - c.square() / 48.0, torch.tanh(0.5 * safe) / (2.0 * safe))


def log_offset(form: LogisticForm, c: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """Compute ``ℓ − b log 2 − b log cosh(c/2) + ½ ω̄ c²``, the log bound at ψ = 0.

    :param form: logistic form of the data.
    :param c: variational parameter.

    >>> log_offset(binomial(torch.ones(1), torch.tensor(1.0)), torch.zeros(1)).exp()  # the bound is tight at ψ = c
    tensor([0.5000])
    """
    log_cosh = 0.5 * c.abs() + softplus(-c.abs()) - math.log(2.0)
    return form.log_constant - form.trials * (math.log(2.0) + log_cosh) + 0.5 * precision(form.trials, c) * c.square()


def variational_parameter(mean: Float[Tensor, "*#batch"], variance: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """Compute the optimal c for ``ψ ~ N(mean, variance)``: ``c² = E ψ²``, where the expected bound has zero gradient in c.

    :param mean: means of ψ.
    :param variance: variances of ψ.

    >>> variational_parameter(torch.tensor(3.0), torch.tensor(16.0))
    tensor(5.)
    """
    return (mean.square() + variance).sqrt()


def collapsed_log_bound(
    features: Float[Tensor, "*#batch N L"], form: LogisticForm, c: Float[Tensor, "*#batch N D"]
) -> Float[Tensor, "*batch D"]:
    r"""Compute a lower bound on :math:`\log \int N(a_d; 0, I) \prod_n p(y_{nd} \mid \varphi_n^T a_d)\, da_d` of each output.

    .. math::

        \tfrac12 (\Phi^T\kappa_d)^T V_d\, \Phi^T\kappa_d - \tfrac12 \log|V_d^{-1}|
        + \sum_n \big[\ell - b \log 2 - b \log\cosh\tfrac{c}{2} + \tfrac12 \bar\omega c^2\big],
        \qquad V_d^{-1} = I + \Phi^T \mathrm{diag}(\bar\omega_{\cdot d}) \Phi .

    :param features: features Φ.
    :param form: logistic form of the data.
    :param c: variational parameter.

    >>> form = binomial(torch.ones(1, 1), torch.tensor(1.0))
    >>> collapsed_log_bound(torch.zeros(1, 1), form, torch.zeros(1, 1)).exp()
    tensor([0.5000])
    """
    posterior = weight_posterior(features, form.kappa, precision(form.trials, c))
    return log_partition(posterior) + log_offset(form, c).sum(-2)
