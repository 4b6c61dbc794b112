r"""The Gaussian likelihood of a sparse Gaussian process as a quadratic form.

With whitened inducing outputs :math:`u_d \sim N(m_d, S_d)` and :math:`a_n = L_{uu}^{-1} k(Z, x_n)`, the expected log likelihood
of row n is, with the precisions :math:`w_{nd} = 1/\sigma_d^2` where observed and 0 where missing,

.. math::

    \sum_d E \log N(y_{nd};\, c_d + f_{nd},\, \sigma_d^2)
    = c_n + a_n^T b_n - \tfrac12 a_n^T H_n a_n - \tfrac12 t_n k(x_n, x_n), \qquad
    b_n = \sum_d w_{nd} (y_{nd} - c_d)\, m_d, \quad H_n = \sum_d w_{nd} (m_d m_d^T + S_d - I), \quad t_n = \sum_d w_{nd}.

Whatever is evaluated many times at one u costs :math:`M^2` a row instead of :math:`M D`.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Quadratic(NamedTuple):
    """Coefficients of the form; the same matrix H serves all rows unless ``deficit`` says what a row lacks.

    :param constant: c_n.
    :param linear: b_n.
    :param matrix: H of a row with nothing missing.
    :param deficit: H − H_n for each row, or None if no row misses anything.
    :param trace: t_n.
    """

    constant: Float[Tensor, "*batch N"]
    linear: Float[Tensor, "*batch N M"]
    matrix: Float[Tensor, "*batch M M"]
    deficit: Float[Tensor, "*batch N M M"] | None
    trace: Float[Tensor, "*batch N"]


def gaussian_quadratic(
    residual: Float[Tensor, "*#batch N D"],
    observed: Bool[Tensor, "N D"],
    precision: Float[Tensor, "*#batch D"],
    u: Float[Tensor, "*#batch D M"],
    u_scale_tril: Float[Tensor, "D M M"] | None = None,
) -> Quadratic:
    """The coefficients for rows of data.

    :param residual: y − c, anything finite where missing.
    :param observed: which entries are observed.
    :param precision: 1/σ² of each output.
    :param u: whitened inducing outputs, or their means m_d.
    :param u_scale_tril: Cholesky factors of their covariances S_d.
    """
    weight = precision.unsqueeze(-2) * observed
    log_precision = (precision / (2.0 * math.pi)).log().unsqueeze(-2)
    constant = 0.5 * (observed * log_precision - weight * residual.square()).sum(-1)
    matrix = _weighted(precision, u, u_scale_tril)
    deficit = None
    incomplete = (~observed).any(-1).nonzero().squeeze(-1)
    if len(incomplete):
        missing = precision.unsqueeze(-2) * ~observed[incomplete]
        lacking = _weighted(missing, u.unsqueeze(-3), u_scale_tril)
        deficit = lacking.new_zeros(*lacking.shape[:-3], *observed.shape[:1], *lacking.shape[-2:])
        deficit = deficit.index_copy(-3, incomplete, lacking)
    return Quadratic(constant, (weight * residual) @ u, matrix, deficit, weight.sum(-1))


def evaluate(
    form: Quadratic, a: Float[Tensor, "*#batch M N"], variance: Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """The expected log likelihood of each row.

    :param form: its coefficients.
    :param a: a_n in columns.
    :param variance: k(x_n, x_n).
    """
    return form.constant + ((form.linear.mT - 0.5 * _matrix_times(form, a)) * a).sum(-2) - 0.5 * form.trace * variance


def gradient(form: Quadratic, a: Float[Tensor, "*#batch M N"]) -> Float[Tensor, "*batch M N"]:
    """Gradient of each row's expected log likelihood in a_n, in columns: ``b_n − H_n a_n``.

    :param form: its coefficients.
    :param a: a_n in columns.
    """
    return form.linear.mT - _matrix_times(form, a)


def _matrix_times(form: Quadratic, a: Tensor) -> Tensor:
    H_a = form.matrix @ a
    if form.deficit is not None:
        H_a = H_a - (form.deficit @ a.mT.unsqueeze(-1)).squeeze(-1).mT
    return H_a


def _weighted(w: Tensor, u: Tensor, scale_tril: Tensor | None) -> Tensor:
    """Σ_d w_d (u_d u_dᵀ + S_d − I): [*, D], [*, D, M] -> [*, M, M]."""
    M = u.shape[-1]
    total = u.mT @ (w[..., None] * u) - w.sum(-1)[..., None, None] * torch.eye(M, dtype=u.dtype, device=u.device)
    if scale_tril is not None:
        covariance = scale_tril @ scale_tril.mT
        total = total + (w @ covariance.flatten(-2)).unflatten(-1, (M, M))
    return total
