r"""The Gaussian likelihood of a sparse Gaussian process as a quadratic form.

With whitened inducing outputs :math:`u_d \sim N(m_d, S_d)` and :math:`a_n = L_{uu}^{-1} k(Z, x_n)`, the expected log
likelihood of row n is, with the precisions :math:`w_{nd} = 1/\sigma_d^2` where observed and 0 where missing,

.. math::

    \sum_d E \log N(y_{nd};\, c_d + f_{nd},\, \sigma_d^2)
    = c_n + a_n^T b_n - \tfrac12 a_n^T H_n a_n - \tfrac12 t_n k(x_n, x_n), \qquad
    b_n = \sum_d w_{nd} (y_{nd} - c_d)\, m_d, \quad H_n = \sum_d w_{nd} (m_d m_d^T + S_d - I), \quad t_n = \sum_d w_{nd}.

An evaluation at a given u costs :math:`M^2` a row instead of :math:`M D`.  Terms as large as
:math:`\sum_d y_{nd}^2 / \sigma_d^2` cancel, so that the rounding error of a row is that sum times the machine epsilon.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Quadratic", "RBFScore", "evaluate", "gaussian_quadratic", "gradient", "rbf_score", "weighted_moments"]


class Quadratic(NamedTuple):
    """Coefficients of the form; all rows share the matrix H, from which ``deficit`` is subtracted where entries are missing.

    :param constant: c_n.
    :param linear: b_n.
    :param matrix: H of a complete row.
    :param deficit: H − H_n for each row, or None if all rows are complete.
    :param trace: t_n.
    """

    constant: Float[Tensor, "*batch N"]
    linear: Float[Tensor, "*batch N M"]
    matrix: Float[Tensor, "*batch M M"]
    deficit: Float[Tensor, "*batch N M M"] | None
    trace: Float[Tensor, "*batch N"]


def gaussian_quadratic(
    residual: Float[Tensor, "*#batch N D"],
    observed: Bool[Tensor, "N D"] | None,
    precision: Float[Tensor, "*#batch D"],
    u: Float[Tensor, "*#batch D M"],
    u_scale_tril: Float[Tensor, "D M M"] | None = None,
    incomplete: Int[Tensor, " R"] | None = None,
) -> Quadratic:
    """Compute the coefficients for rows of data.

    :param residual: y − c, any finite number where missing.
    :param observed: mask of the observed entries; None if all are observed.
    :param precision: 1/σ² of each output.
    :param u: whitened inducing outputs, or their means m_d.
    :param u_scale_tril: Cholesky factors of their covariances S_d.
    :param incomplete: indices of the rows with missing entries, to do no work for the others; None for all rows.

    >>> y, observed = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])
    >>> form = gaussian_quadratic(y, observed, torch.ones(2), torch.tensor([[0.5], [3.0]]))
    >>> form.linear, form.matrix, form.deficit, form.trace
    (tensor([[0.5000]]), tensor([[7.2500]]), tensor([[[8.]]]), tensor([1.]))
    """
    weight = precision.unsqueeze(-2)
    log_weight = (weight / (2.0 * math.pi)).log()
    if observed is None:
        weight = weight.expand(*weight.shape[:-2], *residual.shape[-2:])
    else:
        weight, log_weight = weight * observed, log_weight * observed
    constant = 0.5 * (log_weight - weight * residual.square()).sum(-1)
    deficit = None if observed is None else _deficit(observed, precision, u, u_scale_tril, incomplete)
    matrix = weighted_moments(precision, u, u_scale_tril)
    return Quadratic(constant, (weight * residual) @ u, matrix, deficit, weight.sum(-1))


def evaluate(
    form: Quadratic, a: Float[Tensor, "*#batch M N"], variance: Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """Evaluate the expected log likelihood of each row.

    :param form: coefficients of the form.
    :param a: a_n in columns.
    :param variance: k(x_n, x_n).

    >>> form = gaussian_quadratic(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.ones(1), torch.full((1, 1), 0.5))
    >>> evaluate(form, torch.ones(1, 1), torch.ones(1))  # f = ½: log N(1; ½, 1)
    tensor([-1.0439])
    """
    return form.constant + ((form.linear.mT - 0.5 * _matrix_times(form, a)) * a).sum(-2) - 0.5 * form.trace * variance


class RBFScore(NamedTuple):
    """Coefficients of the gradient of the form in x_n under an RBF kernel, with points scaled by the lengthscale.

    :param centre: origin of the points, to reduce rounding.
    :param points: (Z − centre) / ℓ.
    :param offset: log σ² − ½ ‖point‖².
    :param Luu_inv: L_uu⁻¹.
    :param linear: L_uu⁻ᵀ b, in columns.
    :param matrix: L_uu⁻ᵀ H.
    :param deficit: L_uu⁻ᵀ (H − H_n) for each row, or None.
    """

    centre: Float[Tensor, "1 Q"]
    lengthscale: Float[Tensor, "*batch #Q"]
    points: Float[Tensor, "*batch M Q"]
    offset: Float[Tensor, "*batch M 1"]
    Luu_inv: Float[Tensor, "*batch M M"]
    linear: Float[Tensor, "*batch M N"]
    matrix: Float[Tensor, "*batch M M"]
    deficit: Float[Tensor, "*batch N M M"] | None


def rbf_score(
    form: Quadratic,
    Luu_inv: Float[Tensor, "*#batch M M"],
    Z: Float[Tensor, "M Q"],
    variance: Float[Tensor, "*#batch"],
    lengthscale: Float[Tensor, "*#batch #Q"],
) -> RBFScore:
    """Compute the coefficients of :func:`gradient` that do not depend on the latents.

    :param form: coefficients of the form.
    :param Luu_inv: inverse Cholesky factor of k(Z, Z).
    :param Z: inducing points.
    :param variance: of the kernel.
    :param lengthscale: of the kernel, one for each latent dimension or for all.
    """
    centre = Z.detach().mean(-2, keepdim=True)
    points = (Z - centre) / lengthscale.unsqueeze(-2)
    offset = variance.log()[..., None, None] - 0.5 * points.square().sum(-1, keepdim=True)
    deficit = None if form.deficit is None else Luu_inv.mT.unsqueeze(-3) @ form.deficit
    linear, matrix = Luu_inv.mT @ form.linear.mT, Luu_inv.mT @ form.matrix
    return RBFScore(centre, lengthscale.unsqueeze(-2), points, offset, Luu_inv, linear, matrix, deficit)


def gradient(score: RBFScore, X: Float[Tensor, "*#batch N Q"]) -> Float[Tensor, "*batch N Q"]:
    """Gradient in x_n of each row's form: ``Σ_m c_mn k_mn (z_m − x_n) / ℓ²`` with ``c = L_uu⁻ᵀ (b − H a)``.

    :param score: returned by :func:`rbf_score`.
    :param X: latents.

    >>> one = torch.ones(1, 1)
    >>> form = gaussian_quadratic(one, one.bool(), torch.ones(1), torch.full((1, 1), 0.5))
    >>> score = rbf_score(form, one, torch.zeros(1, 1), torch.tensor(1.0), torch.tensor([1.0]))  # f = ½ k(0, x)
    >>> gradient(score, torch.zeros(1, 1)), gradient(score, one)
    (tensor([[0.]]), tensor([[-0.5792]]))
    """
    x = (X - score.centre) / score.lengthscale
    K = (score.points @ x.mT + score.offset - 0.5 * x.square().sum(-1)[..., None, :]).exp()
    a = score.Luu_inv @ K
    cotangent = score.linear - score.matrix @ a
    if score.deficit is not None:
        cotangent = cotangent + (score.deficit @ a.mT.unsqueeze(-1)).squeeze(-1).mT
    weight = cotangent * K
    return (weight.mT @ score.points - weight.sum(-2)[..., None] * x) / score.lengthscale


def weighted_moments(
    weight: Float[Tensor, "*#batch D"], u: Float[Tensor, "*#batch D M"], u_scale_tril: Float[Tensor, "D M M"] | None = None
) -> Float[Tensor, "*batch M M"]:
    """Compute the sum ``Σ_d w_d (u_d u_dᵀ + S_d − I)``.

    :param weight: w_d.
    :param u: whitened inducing outputs u_d, or their means.
    :param u_scale_tril: Cholesky factors of their covariances S_d; None for 0.

    >>> weighted_moments(torch.tensor([2.0]), torch.tensor([[3.0]]))
    tensor([[16.]])
    """
    M = u.shape[-1]
    total = u.mT @ (weight[..., None] * u) - weight.sum(-1)[..., None, None] * torch.eye(M, dtype=u.dtype, device=u.device)
    if u_scale_tril is not None and weight.dim() == 1:
        # Σ_d w_d L_d L_dᵀ as one product [M, D M] × [D M, M].
        columns = (weight.sqrt()[:, None, None] * u_scale_tril).movedim(0, 1).flatten(1)
        total = total + columns @ columns.mT
    elif u_scale_tril is not None:
        covariance = u_scale_tril @ u_scale_tril.mT
        total = total + (weight @ covariance.flatten(-2)).unflatten(-1, (M, M))
    return total


def _deficit(
    observed: Tensor, precision: Tensor, u: Tensor, scale_tril: Tensor | None, incomplete: Tensor | None
) -> Float[Tensor, "*batch N M M"]:
    """Differences H − H_n, computed for incomplete rows and zero for the others."""
    rows = observed if incomplete is None else observed[incomplete]
    deficit = weighted_moments(precision.unsqueeze(-2) * ~rows, u.unsqueeze(-3), scale_tril)
    if incomplete is None:
        return deficit
    zeros = deficit.new_zeros(*deficit.shape[:-3], *observed.shape[:1], *deficit.shape[-2:])
    return zeros.index_copy(-3, incomplete, deficit)


def _matrix_times(form: Quadratic, a: Tensor) -> Tensor:
    """Products H_n a_n, in columns."""
    H_a = form.matrix @ a
    if form.deficit is not None:
        H_a = H_a - (form.deficit @ a.mT.unsqueeze(-1)).squeeze(-1).mT
    return H_a
