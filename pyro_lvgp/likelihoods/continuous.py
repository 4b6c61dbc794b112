"""Likelihoods of real and of positive numbers."""

import math
import warnings

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp.likelihoods.base import Likelihood, QuadraticLikelihood, WithParameter
from pyro_lvgp.ops.expected_log_likelihood import gaussian_quadratic, heteroscedastic_quadratic
from pyro_lvgp.ops.student_t import (
    expected_log_student_t,
    log_student_t_plus_normal,
    log_student_t_plus_normal_derivatives,
)

__all__ = ["Gaussian", "LogNormal", "StudentT", "as_likelihood"]


# Variances of the noise relative to those of columns, and for constant columns relative to the mean of all columns.
_SMALLEST_NOISE, _NOISE_OF_CONSTANTS = 1e-8, 1e-4


class _WithNoise(WithParameter):
    """Base class of likelihoods whose parameter is the scale of noise, or its square."""

    noise_power = 2

    @torch.no_grad()
    def bound_noise(self, y, columns=None):
        """Bound a noise parameter of each output from below, at 1e-8 of the variance of its column.

        Without a bound the noise of a column that the model reproduces exactly tends to zero, the bound on the evidence rises
        without limit, and the model neglects all other columns.  The noise variance of a constant column is at least 1e-4 of
        the mean variance of all columns, with a warning that names the column.  Shared noise is not bounded.

        :param y: training data, NaN where missing.
        :param columns: indices of the columns, for the warning; 0, 1, … by default.
        """
        if not self._per_output or len(y) < 2:
            return
        f = self.inverse_link(y)
        deviation = f - f.nanmean(0)
        variance = deviation.square().nanmean(0)
        rounding = (torch.finfo(f.dtype).eps * f.nan_to_num().abs().amax(0)).square() * len(f)
        is_constant = variance <= rounding
        typical = variance.mean()
        of_constants = _NOISE_OF_CONSTANTS * torch.where(typical > 0.0, typical, 1.0)
        floor = torch.where(is_constant, of_constants, _SMALLEST_NOISE * variance)
        if is_constant.any():
            names = is_constant.nonzero().flatten() if columns is None else columns[is_constant]
            warnings.warn(
                f"columns {names.tolist()} of the data are constant: with a noise of their own the bound would rise without "
                f"limit; their noise variance is at least {float(of_constants):.1e}: drop these columns, or share one noise "
                "parameter (data_dim=None)",
                RuntimeWarning,
                stacklevel=3,
            )
        self.noise_floor = floor if self.noise_power == 2 else floor.sqrt()


class _AdditiveNoise(_WithNoise):
    """Base class of likelihoods of real numbers with the identity link."""

    def check(self, y):
        """Accept all data, since every real number is in the support."""

    def inverse_link(self, y):
        return y


class Gaussian(_AdditiveNoise, QuadraticLikelihood):
    """Gaussian likelihood ``y ~ N(f, σ²)``.

    :param variance: initial noise variance σ², in squared units of y.
    :param data_dim: number of outputs, for a variance of each output; None shares one.

    The attribute ``variance`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.

    >>> Gaussian(0.25)(torch.zeros(3, 2)).variance[0, 0].detach()
    tensor(0.2500)
    """

    def __init__(self, variance: float | Tensor = 0.3, *, data_dim: int | None = None):
        super().__init__("variance", variance, data_dim)

    def add_variance(self, params, variance):
        return params + variance

    def distribution(self, f, params):
        return dist.Normal(f, params.sqrt())

    def expected_log_prob(self, y, mean, variance, params):
        # log N(y; mean, θ) − variance / 2θ.  The term log 2πθ is computed once, not for every entry.
        return -0.5 * (((y - mean).square() + variance) / params + (2.0 * math.pi * params).log())

    def log_prob_of_rows(self, y, observed, mean, variance, params):
        # For long rows the cost is that of operations on all entries, which terms of θ alone do not need.
        params = torch.atleast_2d(params)
        if params.shape[-2] > 1:  # variances of each row
            return super().log_prob_of_rows(y, observed, mean, variance, params)
        params = params.expand(*params.shape[:-1], y.shape[-1])
        log_scale, square = (2.0 * math.pi * params).log(), (mean - y).square()
        if variance is not None:
            square = square + variance
        if holds(observed.all()):
            log_det = log_scale.sum(-1)
        else:
            log_det, square = (observed.to(params) @ log_scale.mT).squeeze(-1), torch.where(observed, square, 0.0)
        return -0.5 * ((square @ params.reciprocal().mT).squeeze(-1) + log_det)

    def log_predictive_density(self, y, mean, variance, params):
        return dist.Normal(mean, (variance + params).sqrt()).log_prob(y)

    def moments(self, mean, variance, params):
        mean, variance = torch.broadcast_tensors(mean, variance + params)
        return mean, variance

    def quadratic_form(self, residual, observed, u, u_scale_tril, params, incomplete, variance=None):
        precision = (params if variance is None else params.unsqueeze(-2) + variance).reciprocal()
        precision = precision.expand(*precision.shape[:-1], residual.shape[-1])
        if variance is None:
            return gaussian_quadratic(residual, observed, precision, u, u_scale_tril, incomplete)
        return heteroscedastic_quadratic(residual, observed, precision, u, u_scale_tril)


class LogNormal(_WithNoise):
    """Log-normal likelihood ``log y ~ N(f, σ²)`` of positive y: f is the logarithm of the median.

    :param variance: initial variance σ² of log y.
    :param data_dim: number of outputs, for a variance of each output; None shares one.

    The attribute ``variance`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.

    >>> LogNormal(0.5)(torch.zeros(1)).mean.detach()
    tensor([1.2840])
    """

    fill_value = 1.0
    has_log_link = True

    def __init__(self, variance: float | Tensor = 0.3, *, data_dim: int | None = None):
        super().__init__("variance", variance, data_dim)

    def support_text(self):
        return "positive numbers"

    def distribution(self, f, params):
        return dist.LogNormal(f, params.sqrt())

    def inverse_link(self, y):
        return y.log()

    def expected_log_prob(self, y, mean, variance, params):
        log_y = y.log()
        return -0.5 * (((log_y - mean).square() + variance) / params + (2.0 * math.pi * params).log()) - log_y

    def log_predictive_density(self, y, mean, variance, params):
        return dist.LogNormal(mean, (variance + params).sqrt()).log_prob(y)

    def moments(self, mean, variance, params):
        y = dist.LogNormal(mean, (variance + params).sqrt())
        return y.mean, y.variance


class StudentT(_AdditiveNoise):
    """Student-t likelihood ``y ~ t_ν(f, s)``, whose heavy tails make it robust to outliers.

    :param scale: initial s, in units of y.
    :param df: degrees of freedom ν, above 2, which are not learned; for large ν the likelihood is nearly Gaussian.
    :param data_dim: number of outputs, for a scale of each output; None shares one.
    :raises ValueError: if ``df`` is not above 2 and finite, or the scale is not positive or of another shape.

    The attribute ``scale`` is a ``PyroParam`` of shape [] or [data_dim]; assign a ``PyroSample`` for a prior.
    ``initialize`` of our models excludes single outliers of a column from its linear model.

    >>> StudentT(0.5)(torch.zeros(1)).variance.detach()
    tensor([0.5000])

    Source: Lange, Little and Taylor (1989), "Robust statistical modeling using the t distribution"; Vanhatalo, Jylänki and
    Vehtari (2009), "Gaussian process regression with Student-t likelihood".
    """

    noise_power = 1

    def __init__(self, scale: float | Tensor = 0.5, *, df: float = 4.0, data_dim: int | None = None):
        super().__init__("scale", scale, data_dim)
        if not 2.0 < df < math.inf:
            raise ValueError(
                f"expected df above 2, below which y has no variance, and finite, got {df}; 4 is a common choice, and "
                "without heavy tails use Gaussian()"
            )
        self.df = df

    def distribution(self, f, params):
        return dist.StudentT(self.df, f, params)

    def initial_function(self, y):
        """Set to NaN entries more than five robust standard deviations from the median of their column.

        Rows of which more than half of the entries would be set to NaN stay unchanged.

        :param y: data, NaN where missing.
        """
        deviation = (y - y.nanmedian(0).values).abs()
        spread = 1.4826 * deviation.nanmedian(0).values  # an estimate of the standard deviation of a normal
        is_outlier = (deviation > 5.0 * spread) & (spread > 0.0)
        is_mostly_outliers = 2 * is_outlier.sum(-1, keepdim=True) > (~torch.isnan(y)).sum(-1, keepdim=True)
        return y.masked_fill(is_outlier & ~is_mostly_outliers, torch.nan)

    def expected_log_prob(self, y, mean, variance, params):
        return expected_log_student_t(y - mean, params, self.df, variance)

    def log_predictive_density(self, y, mean, variance, params):
        return log_student_t_plus_normal(y - mean, params, self.df, variance)

    def log_predictive_derivatives(self, y, mean, variance, params):
        density, first, second = log_student_t_plus_normal_derivatives(y - mean, params, self.df, variance)
        return density, -first, second

    def moments(self, mean, variance, params):
        mean, variance = torch.broadcast_tensors(mean, variance + params.square() * (self.df / (self.df - 2.0)))
        return mean, variance


def as_likelihood(likelihood: Likelihood | None) -> Likelihood:
    """Return the likelihood, or ``Gaussian()`` for None.

    :param likelihood: a likelihood, or None.
    :raises TypeError: for anything else, such as a name or a class.
    """
    if likelihood is None:
        return Gaussian()
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"expected a likelihood, got {likelihood!r}; make one, such as Gaussian()")
    return likelihood
