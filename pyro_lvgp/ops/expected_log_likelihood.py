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

__all__ = [
    "Quadratic",
    "among_rows",
    "deficit_times",
    "evaluate",
    "gaussian_quadratic",
    "heteroscedastic_quadratic",
    "weighted_moments",
    "with_offset",
]


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

    @classmethod
    def of_rows(
        cls,
        constant: Float[Tensor, "*#batch N"],
        linear: Float[Tensor, "*#batch N M"],
        matrices: Float[Tensor, "*#batch N M M"],
        trace: Float[Tensor, "*#batch N"],
    ) -> "Quadratic":
        """Return the form of rows that share no matrix.

        :param constant: c_n.
        :param linear: b_n.
        :param matrices: H_n of each row.
        :param trace: t_n.
        """
        return cls(constant, linear, matrices.new_zeros(matrices.shape[-2:]), -matrices, trace)


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
    matrix, deficit = weighted_moments(precision, u, u_scale_tril), None
    if observed is not None:
        missing = ~(observed if incomplete is None else observed[incomplete])
        own = weighted_moments(precision.unsqueeze(-2) * missing, u.unsqueeze(-3), u_scale_tril)
        deficit = among_rows(own, incomplete, len(observed))
    return Quadratic(constant, (weight * residual) @ u, matrix, deficit, weight.sum(-1))


def heteroscedastic_quadratic(
    residual: Float[Tensor, "*#batch N D"],
    observed: Bool[Tensor, "N D"] | None,
    precision: Float[Tensor, "*#batch N D"],
    u: Float[Tensor, "*#batch D M"],
    u_scale_tril: Float[Tensor, "D M M"] | None = None,
) -> Quadratic:
    """Compute the coefficients for rows of data with a noise variance of each entry, and so a matrix H_n of each row.

    :param residual: y − c, any finite number where missing.
    :param observed: mask of the observed entries; None if all are observed.
    :param precision: w_nd, 1/σ² of each entry.
    :param u: whitened inducing outputs, or their means m_d.
    :param u_scale_tril: Cholesky factors of their covariances S_d.

    >>> y, u = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5], [3.0]])
    >>> form = heteroscedastic_quadratic(y, None, torch.tensor([[1.0, 2.0]]), u)
    >>> form.linear, form.matrix - form.deficit  # ½ · 1 + 2 · 2 · 3, and (¼ − 1) + 2 (9 − 1)
    (tensor([[12.5000]]), tensor([[[15.2500]]]))
    """
    log_precision = (precision / (2.0 * math.pi)).log()
    if observed is not None:
        precision, log_precision = precision * observed, log_precision * observed
    constant = 0.5 * (log_precision - precision * residual.square()).sum(-1)
    moments = u.unsqueeze(-1) * u.unsqueeze(-2) - torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    if u_scale_tril is not None:
        moments = moments + u_scale_tril @ u_scale_tril.mT
    matrices = (precision @ moments.flatten(-2)).unflatten(-1, moments.shape[-2:])  # one product for all rows
    return Quadratic.of_rows(constant, (precision * residual) @ u, matrices, precision.sum(-1))


def evaluate(
    form: Quadratic, a: Float[Tensor, "*#batch N M"], variance: Float[Tensor, "*#batch N"]
) -> Float[Tensor, "*batch N"]:
    """Evaluate the expected log likelihood of each row.

    :param form: coefficients of the form.
    :param a: a_n in rows.
    :param variance: k(x_n, x_n).

    >>> form = gaussian_quadratic(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.ones(1), torch.full((1, 1), 0.5))
    >>> evaluate(form, torch.ones(1, 1), torch.ones(1))  # f = ½: log N(1; ½, 1)
    tensor([-1.0439])
    """
    slope = torch.sub(form.linear, a @ form.matrix, alpha=0.5)
    if form.deficit is not None:
        slope = torch.add(slope, deficit_times(form.deficit, a), alpha=0.5)
    return torch.addcmul(form.constant + (slope * a).sum(-1), form.trace, variance, value=-0.5)


def with_offset(form: Quadratic, offset: Float[Tensor, "*#batch #N M"]) -> Quadratic:
    """Return the form whose value at ``a`` is that of another one at ``a + offset``.

    :param form: coefficients of the form.
    :param offset: a vector for each row, or one for all.

    >>> form = gaussian_quadratic(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.ones(1), torch.full((1, 1), 0.5))
    >>> one, two = torch.ones(1, 1), torch.full((1, 1), 2.0)
    >>> evaluate(with_offset(form, one), one, torch.ones(1)) - evaluate(form, two, torch.ones(1))
    tensor([0.])
    """
    linear = form.linear - offset @ form.matrix
    if form.deficit is not None:
        linear = linear + deficit_times(form.deficit, offset)
    return form._replace(constant=evaluate(form, offset, torch.zeros_like(form.trace)), linear=linear)


def among_rows(
    matrices: Float[Tensor, "*batch R M M"], index: Int[Tensor, " R"] | None, num_rows: int
) -> Float[Tensor, "*batch N M M"]:
    """Return a matrix for each of all rows: those of some rows, and zero for the others.

    :param matrices: a matrix for each of some rows.
    :param index: indices of these rows; None for all rows.
    :param num_rows: number of all rows.

    >>> among_rows(torch.ones(1, 1, 1), torch.tensor([1]), 3).flatten()
    tensor([0., 1., 0.])
    """
    if index is None:
        return matrices
    return matrices.new_zeros(*matrices.shape[:-3], num_rows, *matrices.shape[-2:]).index_copy(-3, index, matrices)


def deficit_times(deficit: Float[Tensor, "*#batch N M M"], a: Float[Tensor, "*#batch N M"]) -> Float[Tensor, "*batch N M"]:
    """Multiply each row by a matrix of its own.

    :param deficit: matrices A_n.
    :param a: a_n in rows.
    :returns: a_nᵀ A_n.

    >>> deficit_times(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[1.0, 0.0]]))
    tensor([[1., 2.]])
    """
    return (a.unsqueeze(-2) @ deficit).squeeze(-2)


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
