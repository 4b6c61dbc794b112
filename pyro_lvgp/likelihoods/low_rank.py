"""Gaussian likelihood of rows whose residuals have a low-rank-plus-diagonal covariance."""

from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Bool, Float
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp._utils.seeding import normal_draws
from pyro_lvgp.conjugate.factor_analysis import factor_analysis
from pyro_lvgp.likelihoods.base import QuadraticLikelihood
from pyro_lvgp.likelihoods.rows import RowLikelihood
from pyro_lvgp.ops import low_rank

__all__ = ["LowRankGaussian"]

_SMALL = 1e-3  # initial noise variances are at least this share of the variance of their column


class _Residual(NamedTuple):
    """Distribution N(loc, W Wᵀ + Ψ) of the residuals y − f of a row."""

    loc: Float[Tensor, "*batch D"]
    cov_factor: Float[Tensor, "*batch D r"]
    cov_diag: Float[Tensor, "*batch D"]

    @classmethod
    def unpack(cls, params: Float[Tensor, "*batch parts D"]) -> "_Residual":
        return cls(params[..., 0, :], params[..., 1:-1, :].mT, params[..., -1, :])

    def pack(self) -> Float[Tensor, "*batch parts D"]:
        rows = self.loc.unsqueeze(-2), self.cov_factor.mT, self.cov_diag.unsqueeze(-2)
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in rows))
        return torch.cat([x.expand(*batch, *x.shape[-2:]) for x in rows], -2)


class LowRankGaussian(RowLikelihood, QuadraticLikelihood):
    r"""Gaussian likelihood of rows with a low-rank-plus-diagonal covariance: linear factors beside the functions.

    .. math::

        y_n = f_n + W z_n + \epsilon_n, \quad z_n \sim N(0, I_r), \quad \epsilon_n \sim N(0, \Psi), \qquad
        y_n \mid f_n \sim N(f_n,\, W W^T + \Psi), \quad \Psi = \mathrm{diag}(\psi_1, \dots, \psi_D)

    The factors z_n are marginalised, for any missing entries.  They explain correlations between the residuals of a row that
    few nonlinear latents cannot.  The missing entries m of a row are predicted from its observed entries o, with
    :math:`R = (y - m)_o`, variances v of f, :math:`\Psi' = \Psi + \mathrm{diag}\, v` and
    :math:`C = I + W_o^T \Psi_o'^{-1} W_o`, by

    .. math::

        y_m \mid y_o \sim N\big(m_m + W_m C^{-1} W_o^T \Psi_o'^{-1} R,\; W_m C^{-1} W_m^T + \Psi_m'\big)

    in ``impute`` of a model, and in :meth:`~pyro_lvgp.models.Prediction.with_observed` of any of its predictions.  ``predict``
    and ``reconstruct`` are predictions given the latents alone.

    A row costs :math:`O(D r^2)` more than under :class:`Gaussian`.  Rows without missing entries share one Cholesky factor.

    :param rank: number r of factors; for 0 this is ``Gaussian(data_dim=data_dim)``.
    :param data_dim: number D of outputs.
    :param variance: initial noise variances ψ, one for all outputs or one for each, in squared units of y.
    :param seed: seed of the initial W, which is small and random, until ``initialize`` of a model fits W and ψ to the
        residuals of a linear model by :func:`~pyro_lvgp.conjugate.factor_analysis.factor_analysis`.
    :raises ValueError: if the rank is negative or larger than ``data_dim``, or a variance is not positive.

    The attributes ``cov_factor`` [D, r] and ``cov_diag`` [D] are ``PyroParam`` s, named as in
    ``torch.distributions.LowRankMultivariateNormal``; assign a ``PyroSample`` for a prior.

    >>> likelihood = LowRankGaussian(1, 3, variance=0.5)
    >>> y = likelihood(torch.zeros(10, 3))
    >>> y.batch_shape, y.event_shape
    (torch.Size([10]), torch.Size([3]))
    >>> likelihood.cov_factor = torch.tensor([[1.0], [-1.0], [0.0]])
    >>> y, observed = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[True, False, False]])
    >>> zeros = torch.zeros(1, 3)
    >>> missing = likelihood.moments(zeros, zeros, likelihood.condition(y, observed, zeros, zeros, likelihood.params()))
    >>> missing[0].detach()[:, 1:], missing[1].detach()[:, 1:]  # mean and variance of the second and third entry
    (tensor([[-1.3333,  0.0000]]), tensor([[0.8333, 0.5000]]))

    Source: Bishop (2006), section 12.2.4; Rasmussen and Williams (2006), section 2.7, for a linear model beside a process.
    """

    def __init__(self, rank: int, data_dim: int, *, variance: float | Tensor = 0.3, seed: int = 0):
        super().__init__()
        if not 0 <= rank <= data_dim:
            raise ValueError(f"expected a rank from 0 to data_dim={data_dim}, got {rank}; a few factors suffice")
        variance = variance if torch.is_tensor(variance) else torch.tensor(variance, dtype=torch.get_default_dtype())
        if variance.shape not in ((), (1,), (data_dim,)) or not (variance > 0.0).all():
            raise ValueError(
                f"expected one positive variance, or data_dim={data_dim} of them, got {variance.tolist()}; pass the noise "
                "variances of the outputs"
            )
        self.rank, self.data_dim = rank, data_dim
        diagonal = variance.expand(data_dim).clone()
        factor = 0.1 * diagonal.sqrt()[:, None] * normal_draws(data_dim, rank, seed=seed, like=diagonal)
        self.cov_factor: Any = PyroParam(factor, constraints.real)
        self.cov_diag: Any = PyroParam(diagonal, constraints.softplus_positive)

    def params(self) -> Float[Tensor, "*batch parts D"]:
        """Read the parameters of the residuals, as rows [r + 2, D]: their mean 0, Wᵀ, and the diagonal of Ψ."""
        factor, diagonal = self.cov_factor, self.cov_diag
        return _Residual(torch.zeros_like(diagonal), factor, diagonal).pack()

    def add_variance(self, params, variance):
        residual = _Residual.unpack(params)
        return residual._replace(cov_diag=residual.cov_diag + variance).pack()

    def check_outputs(self, data_dim, params):
        if data_dim != self.data_dim:
            raise ValueError(
                f"expected a likelihood of {data_dim} outputs, got one of {self.data_dim}; pass data_dim={data_dim} to it"
            )

    def check(self, y):
        """Accept all data, since every real number is in the support."""

    def inverse_link(self, y):
        return y

    def distribution(self, f, params):
        residual = _Residual.unpack(params)
        # PyTorch's distribution needs one column or more.
        factor = residual.cov_factor if self.rank else pad(residual.cov_factor, (0, 1))
        return dist.LowRankMultivariateNormal(f + residual.loc, factor, residual.cov_diag)

    def log_prob_of_rows(self, y, observed, mean, variance, params):
        residual = _Residual.unpack(params)
        factors = low_rank.factor_posterior(residual.cov_factor, residual.cov_diag, _unless_complete(observed))
        deviation = y - mean - residual.loc
        if variance is None:
            return low_rank.log_prob(factors, deviation)
        return low_rank.expected_log_prob(factors, deviation, variance)

    def log_predictive_density_of_rows(self, y, observed, mean, variance, params):
        residual = _Residual.unpack(params)
        factors = low_rank.factor_posterior(residual.cov_factor, residual.cov_diag + variance, _unless_complete(observed))
        return low_rank.log_prob(factors, y - mean - residual.loc)

    def condition(self, y, observed, mean, variance, params):
        residual = _Residual.unpack(params)
        factors = low_rank.factor_posterior(residual.cov_factor, residual.cov_diag + variance, observed)
        shift = low_rank.residual_mean(factors, y - mean - residual.loc)
        return _Residual(residual.loc + shift, factors.loadings, residual.cov_diag).pack()

    def log_predictive_density(self, y, mean, variance, params):
        y_mean, y_variance = self.moments(mean, variance, params)
        return dist.Normal(y_mean, y_variance.sqrt()).log_prob(y)

    def moments(self, mean, variance, params):
        residual = _Residual.unpack(params)
        mean, variance = torch.broadcast_tensors(
            mean + residual.loc, variance + residual.cov_diag + residual.cov_factor.square().sum(-1)
        )
        return mean, variance

    def quadratic_form(self, residual, observed, u, u_scale_tril, params, incomplete, variance=None):
        _, factor, diagonal = _Residual.unpack(params)
        return low_rank.low_rank_quadratic(residual, observed, factor, diagonal, u, u_scale_tril, incomplete, variance)

    @torch.no_grad()
    def init_from_data(self, y, f):
        """Fit W and ψ to the residuals y − f, unless one of them is frozen or has a prior.

        :param y: data, NaN where missing.
        :param f: approximate function values.
        """
        if self._pyro_samples or not all(parameter.requires_grad for parameter in self.parameters()):
            return
        factor, diagonal = factor_analysis((y - f).double(), self.rank)
        # Where the linear model leaves no residual, W stays small and random: the gradient is zero at W = 0.
        centred = y - y.nanmean(0)
        floor = _SMALL * centred.square().nanmean(0)
        diagonal = diagonal.to(y).maximum(torch.where(floor > 0.0, floor, _SMALL))
        is_zero = factor.square().sum(0) <= _SMALL * diagonal.min()
        self.cov_factor = torch.where(is_zero, self.cov_factor.detach(), factor.to(y))
        self.cov_diag = diagonal


def _unless_complete(observed: Bool[Tensor, "N D"]) -> Bool[Tensor, "N D"] | None:
    """Return None if all entries are observed, so that rows share one factorisation."""
    return None if holds(observed.all()) else observed
