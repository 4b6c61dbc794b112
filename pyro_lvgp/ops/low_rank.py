r"""Gaussian rows with a low-rank-plus-diagonal covariance, of which any entries may be missing.

.. math::

    e_n = W z_n + \epsilon_n, \quad z_n \sim N(0, I_r), \quad \epsilon_n \sim N(0, \Psi), \qquad
    \mathrm{Cov}(e_n) = \Sigma = W W^T + \Psi

For the observed entries o of a row, with :math:`C = I + W_o^T \Psi_o^{-1} W_o = L L^T` of size r × r and
:math:`K = W L^{-T}`, the formula of Woodbury and the lemma of determinants give

.. math::

    \Sigma_{oo}^{-1} = \Psi_o^{-1} - \Psi_o^{-1} K_o K_o^T \Psi_o^{-1}, \qquad
    \log |\Sigma_{oo}| = \log |\Psi_o| + 2 \log |L|,

.. math::

    E[W z_n \mid e_o] = K K_o^T \Psi_o^{-1} e_o, \qquad \mathrm{Cov}(W z_n \mid e_o) = K K^T .

Nothing of size D × D is computed.  Rows with their own missing entries have their own C, at a cost of :math:`D r^2` each.

Source: Petersen and Pedersen (2012), "The matrix cookbook", eqs. 156 and 24; Bishop (2006), section 12.2.4.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pyro_lvgp.ops.expected_log_likelihood import Quadratic, among_rows, weighted_moments
from pyro_lvgp.ops.linalg import solve_lower

__all__ = [
    "FactorPosterior",
    "expected_log_prob",
    "factor_mean",
    "factor_posterior",
    "log_prob",
    "low_rank_quadratic",
    "marginal_precision",
    "precision_times",
    "residual_mean",
]


class FactorPosterior(NamedTuple):
    """Posterior of the factors z_n of rows, up to the values of the observed entries.

    :param precision: diagonal of Ψ⁻¹, 0 where missing.
    :param loadings: K = W L⁻ᵀ, of all entries.
    :param scale_tril: L.
    :param log_det: ``log |2π Σ_oo|``.
    """

    precision: Float[Tensor, "*batch D"]
    loadings: Float[Tensor, "*batch D r"]
    scale_tril: Float[Tensor, "*batch r r"]
    log_det: Float[Tensor, "*batch"]


def factor_posterior(
    cov_factor: Float[Tensor, "*#batch D r"],
    cov_diag: Float[Tensor, "*#batch D"],
    observed: Bool[Tensor, "*#batch D"] | None = None,
) -> FactorPosterior:
    """Factorise the covariance of the observed entries of rows.

    :param cov_factor: W.
    :param cov_diag: diagonal of Ψ.
    :param observed: mask of the observed entries; None if all are observed, and rows may share one factorisation.

    >>> posterior = factor_posterior(torch.ones(2, 1), torch.ones(2), torch.tensor([[True, True], [True, False]]))
    >>> posterior.precision
    tensor([[1., 1.],
            [1., 0.]])
    >>> posterior.scale_tril.square().flatten()  # C = 1 + number of observed entries
    tensor([3.0000, 2.0000])
    """
    precision, log_diag = cov_diag.reciprocal(), (2.0 * math.pi * cov_diag).log()
    if observed is not None:
        precision, log_diag = torch.where(observed, precision, 0.0), torch.where(observed, log_diag, 0.0)
    identity = torch.eye(cov_factor.shape[-1], dtype=cov_factor.dtype, device=cov_factor.device)
    L = torch.linalg.cholesky(identity + cov_factor.mT @ (precision[..., None] * cov_factor))
    loadings = solve_lower(L, cov_factor.mT).mT
    log_det = log_diag.sum(-1) + 2.0 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return FactorPosterior(precision, loadings, L, log_det)


def factor_mean(posterior: FactorPosterior, residual: Float[Tensor, "*#batch D"]) -> Float[Tensor, "*rows r"]:
    """Compute the posterior mean ``E[z | e_o]`` of the factors; their covariance is ``C⁻¹``.

    :param posterior: result of :func:`factor_posterior`.
    :param residual: e, any finite number where missing.

    >>> posterior = factor_posterior(torch.ones(2, 1), torch.ones(2), torch.tensor([True, False]))
    >>> factor_mean(posterior, torch.tensor([3.0, 0.0]))
    tensor([1.5000])
    """
    return _factor_mean(posterior, _whitened_score(posterior, residual))


def residual_mean(posterior: FactorPosterior, residual: Float[Tensor, "*#batch D"]) -> Float[Tensor, "*rows D"]:
    """Compute the mean ``E[W z | e_o]`` of all entries, observed or missing; its covariance is ``K Kᵀ``.

    :param posterior: result of :func:`factor_posterior`.
    :param residual: e, any finite number where missing.

    >>> posterior = factor_posterior(torch.ones(2, 1), torch.ones(2), torch.tensor([True, False]))
    >>> residual_mean(posterior, torch.tensor([3.0, 0.0]))
    tensor([1.5000, 1.5000])
    """
    return (posterior.loadings @ _whitened_score(posterior, residual)).squeeze(-1)


def precision_times(posterior: FactorPosterior, residual: Float[Tensor, "*#batch D"]) -> Float[Tensor, "*rows D"]:
    """Compute ``Σ_oo⁻¹ e_o``, and 0 for missing entries.

    :param posterior: result of :func:`factor_posterior`.
    :param residual: e, any finite number where missing.

    >>> precision_times(factor_posterior(torch.ones(1, 1), torch.ones(1)), torch.tensor([3.0]))
    tensor([1.5000])
    """
    return posterior.precision * (residual - residual_mean(posterior, residual))


def marginal_precision(posterior: FactorPosterior) -> Float[Tensor, "*batch D"]:
    """Compute the diagonal of ``Σ_oo⁻¹``, and 0 for missing entries.

    :param posterior: result of :func:`factor_posterior`.

    >>> marginal_precision(factor_posterior(torch.ones(2, 1), torch.ones(2)))  # I − 11ᵀ / 3
    tensor([0.6667, 0.6667])
    """
    shrinkage = posterior.precision * posterior.loadings.square().sum(-1)
    # Rounding may make the difference negative.
    return posterior.precision * (1.0 - shrinkage).clamp_min(torch.finfo(shrinkage.dtype).eps)


def log_prob(posterior: FactorPosterior, residual: Float[Tensor, "*#batch D"]) -> Float[Tensor, "*rows"]:
    """Compute the log density ``log N(e_o; 0, Σ_oo)`` of the observed entries of each row.

    :param posterior: result of :func:`factor_posterior`.
    :param residual: e, any finite number where missing.

    >>> log_prob(factor_posterior(torch.ones(1, 1), torch.ones(1)), torch.tensor([0.0]))  # log N(0; 0, 2)
    tensor(-1.2655)
    """
    # eᵀ Σ⁻¹ e = (e − W ẑ)ᵀ Ψ⁻¹ (e − W ẑ) + ẑᵀ ẑ for the posterior mean ẑ = L⁻ᵀ s: a sum of squares, without cancellation.
    score = _whitened_score(posterior, residual)
    noise = residual - (posterior.loadings @ score).squeeze(-1)
    factors = _factor_mean(posterior, score)
    return -0.5 * ((posterior.precision * noise.square()).sum(-1) + factors.square().sum(-1) + posterior.log_det)


def expected_log_prob(
    posterior: FactorPosterior, residual: Float[Tensor, "*#batch D"], variance: Float[Tensor, "*#batch #D"]
) -> Float[Tensor, "*rows"]:
    """Compute ``E log N(y_o; f_o, Σ_oo)`` of each row for independent functions ``f ~ N(m, variance)``.

    :param posterior: result of :func:`factor_posterior`.
    :param residual: y − m, any finite number where missing.
    :param variance: variances of f.

    >>> posterior = factor_posterior(torch.ones(1, 1), torch.ones(1))
    >>> expected_log_prob(posterior, torch.tensor([0.0]), torch.tensor([4.0]))
    tensor(-2.2655)
    """
    return log_prob(posterior, residual) - 0.5 * (marginal_precision(posterior) * variance).sum(-1)


def low_rank_quadratic(
    residual: Float[Tensor, "*#batch N D"],
    observed: Bool[Tensor, "N D"] | None,
    cov_factor: Float[Tensor, "*#batch D r"],
    cov_diag: Float[Tensor, "*#batch D"],
    u: Float[Tensor, "*#batch D M"],
    u_scale_tril: Float[Tensor, "D M M"] | None = None,
    incomplete: Int[Tensor, " R"] | None = None,
    variance: Float[Tensor, "N #D"] | None = None,
) -> Quadratic:
    r"""Compute the quadratic form of :mod:`~pyro_lvgp.ops.expected_log_likelihood` for the covariance Σ.

    .. math::

        b_n = U^T \Sigma_{oo}^{-1} (y_n - c)_o, \qquad
        H_n = U_o^T \Sigma_{oo}^{-1} U_o + \sum_{d \in o} (\Sigma_{oo}^{-1})_{dd} (S_d - I), \qquad
        t_n = \mathrm{tr}\, \Sigma_{oo}^{-1}

    :param residual: y − c, any finite number where missing.
    :param observed: mask of the observed entries; None if all are observed.
    :param cov_factor: W.
    :param cov_diag: diagonal of Ψ.
    :param u: whitened inducing outputs, or their means m_d, the rows of U.
    :param u_scale_tril: Cholesky factors of their covariances S_d.
    :param incomplete: indices of the rows with missing entries, to do no work for the others; None for all rows.
    :param variance: variances of each row that are added to the diagonal of Ψ, so that each row has a matrix H of its own.

    >>> W, y = torch.zeros(2, 1), torch.tensor([[1.0, 2.0]])
    >>> form = low_rank_quadratic(y, torch.tensor([[True, False]]), W, torch.ones(2), torch.tensor([[0.5], [3.0]]))
    >>> form.linear, form.matrix, form.deficit, form.trace
    (tensor([[0.5000]]), tensor([[7.2500]]), tensor([[[8.]]]), tensor([1.]))
    """
    # Each row has a factorisation of its own, or all rows have one: [*, N or 1, ...].
    factor, diagonal = cov_factor.unsqueeze(-3), cov_diag.unsqueeze(-2)
    rows = factor_posterior(factor, diagonal if variance is None else diagonal + variance, observed)
    constant, linear, trace = log_prob(rows, residual), precision_times(rows, residual) @ u, marginal_precision(rows).sum(-1)
    if variance is not None:
        return Quadratic.of_rows(constant, linear, _matrix(rows, u.unsqueeze(-3), u_scale_tril), trace)
    matrix, deficit = _matrix(factor_posterior(cov_factor, cov_diag), u, u_scale_tril), None
    if observed is not None:
        some = rows if incomplete is None else factor_posterior(factor, diagonal, observed[incomplete])
        own = matrix.unsqueeze(-3) - _matrix(some, u.unsqueeze(-3), u_scale_tril)
        deficit = among_rows(own, incomplete, len(observed))
    return Quadratic(constant, linear, matrix, deficit, trace.expand_as(constant))


def _whitened_score(posterior: FactorPosterior, residual: Tensor) -> Float[Tensor, "*batch r 1"]:
    """Products ``s = K_oᵀ Ψ_o⁻¹ e_o``, in columns."""
    return posterior.loadings.mT @ (posterior.precision * residual)[..., None]


def _factor_mean(posterior: FactorPosterior, score: Tensor) -> Float[Tensor, "*batch r"]:
    """Solutions ``L⁻ᵀ s``."""
    return torch.linalg.solve_triangular(posterior.scale_tril.mT, score, upper=True).squeeze(-1)


def _matrix(posterior: FactorPosterior, u: Tensor, u_scale_tril: Tensor | None) -> Float[Tensor, "*batch M M"]:
    """Matrix H of rows with the same missing entries, or of each row for ``u`` [*, 1, D, M]."""
    weighted = posterior.precision[..., None] * posterior.loadings
    off_diagonal, projected = weighted.square().sum(-1), u.mT @ weighted
    # Σ⁻¹ is the sum of its diagonal, of diag(off_diagonal), and of −Ψ⁻¹ K Kᵀ Ψ⁻¹.
    products = u.mT @ (off_diagonal[..., None] * u) - projected @ projected.mT
    return weighted_moments(marginal_precision(posterior), u, u_scale_tril) + products
