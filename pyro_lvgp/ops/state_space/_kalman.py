r"""Kalman filter as the Cholesky factor of I + W K W, and solves with the factor.

The notation is that of :mod:`pyro_lvgp.ops.state_space.inference`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from pyro_lvgp.ops.state_space.models import StateSpaceModel
from pyro_lvgp.ops.state_space.scan import Maps, prefix

__all__ = [
    "KalmanFilter",
    "factorise",
    "look_back",
    "output_row",
    "precision_ahead",
    "predicted_covariances",
    "predicted_states",
    "recursion",
    "run_filter",
    "solve",
]


class KalmanFilter(NamedTuple):
    """Cholesky factor of B = I + W K W, at the inputs in increasing order.

    :param W: square roots of the sites' precisions.
    :param s: squares of the factor's diagonal.
    :param p: covariances of state and process, given the sites up to n.
    :param k: gains, W p.
    :param Psi: transition matrices of the filtered states.
    """

    W: Float[Tensor, "*batch N 1 1"]
    s: Float[Tensor, "*batch N 1 1"]
    p: Float[Tensor, "*batch N S 1"]
    k: Float[Tensor, "*batch N S 1"]
    Psi: Float[Tensor, "*batch T S S"]


def output_row(model: StateSpaceModel) -> Float[Tensor, "*batch 1 1 S"]:
    """Emission vector as a row, for products with columns [*batch, N, S, columns]."""
    return model.emission[..., None, None, :]


def factorise(model: StateSpaceModel, W: Float[Tensor, "*#batch N"], predicted: Tensor | None = None) -> KalmanFilter:
    """Kalman filter: a scan computes the predicted covariances of the states, from which the other terms follow.

    :param model: a model.
    :param W: square roots of the sites' precisions.
    :param predicted: returned by :func:`predicted_states`, if they are known.
    """
    predicted = predicted_states(model, W) if predicted is None else predicted
    W, h = W[..., None, None], output_row(model).mT
    Ph = (predicted @ h.double()).to(h)
    # Rounding may make a variance negative.
    s = 1.0 + W.square() * (h.mT @ Ph).clamp_min(0.0)
    p = Ph / s
    k = W * p
    Psi = model.A - (W * k)[..., 1:, :, :] @ (h.mT @ model.A)
    return KalmanFilter(W, s, p, k, Psi)


def predicted_states(model: StateSpaceModel, W: Float[Tensor, "*#batch N"]) -> Float[Tensor, "*batch N S S"]:
    """Covariances of all states, each given the sites before it, in double precision.

    In single precision, rounding makes I + C J singular for states of sums of kernels and sites of high precision.
    """
    h = output_row(model).mT
    A, Q, P, J = (x.double() for x in (model.A, model.Q, model.P[..., None, :, :], W[..., None, None].square() * h @ h.mT))
    predicted = predicted_covariances(A, Q, P, J)
    return torch.cat([P.expand(*predicted.shape[:-3], -1, -1, -1), predicted], -3)


def predicted_covariances(A: Tensor, Q: Tensor, P: Tensor, J: Tensor) -> Tensor:
    """Covariances of the states after the first, each given the sites before it, whose precisions in the state are J."""
    return prefix((A, Q, J[..., :-1, :, :]), P, _compose_updates, _update)


def _update(maps: Maps, P: Tensor) -> Tensor:
    """Covariance ``A (P⁻¹ + J)⁻¹ Aᵀ + C`` of the next state before its site."""
    A, C, J = maps
    return A @ _solve_plus_identity(P @ J, P) @ A.mT + C


def _compose_updates(first: Maps, second: Maps) -> Maps:
    """Compose two updates, each with its site before its transition: eqs. 14 to 16 of Särkkä and García-Fernández."""
    (A1, C1, J1), (A2, C2, J2) = first, second
    # (I + C₁ J₂)⁻¹ [A₁, C₁]
    A, C = _solve_plus_identity(C1 @ J2, torch.cat(torch.broadcast_tensors(A1, C1), -1)).split(A1.shape[-1], -1)
    return A2 @ A, A2 @ C @ A2.mT + C2, A1.mT @ J2 @ A + J1


def _solve_plus_identity(A: Tensor, B: Tensor) -> Tensor:
    """Solve ``(I + A) X = B`` for the product A of two covariances, so that I + A is regular."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_ex(identity + A, B, check_errors=False).result


def run_filter(model: StateSpaceModel, LB: KalmanFilter, c: Tensor) -> tuple[Tensor, Tensor]:
    """Filtered states, and the innovations divided by s, for columns c."""
    kc = LB.k @ c
    m = recursion(LB.Psi, kc[..., 1:, :, :], kc[..., :1, :, :])
    predicted = output_row(model) @ model.A @ m[..., :-1, :, :]
    return m, (c - LB.W * F.pad(predicted, (0, 0, 0, 0, 1, 0))) / LB.s


def solve(model: StateSpaceModel, LB: KalmanFilter, c: Tensor) -> tuple[Tensor, Tensor]:
    """Solve for ``K W B⁻¹ c`` and ``B⁻¹ c``, with columns c [*batch, N, 1, columns]."""
    m, residual = run_filter(model, LB, c)
    hA = output_row(model) @ model.A
    # Backward pass of the smoother, from the last state to the first.
    information = hA.mT @ (LB.W * residual)[..., 1:, :, :]
    r = recursion(LB.Psi.mT.flip(-3), information.flip(-3), torch.zeros_like(m[..., -1:, :, :])).flip(-3)
    return output_row(model) @ m + LB.p.mT @ r, residual - LB.k.mT @ r


def precision_ahead(model: StateSpaceModel, LB: KalmanFilter) -> Tensor:
    """Precision of the state at n that the sites after n contribute."""
    hA = output_row(model) @ model.A
    precision = hA.mT @ (LB.W.square() / LB.s)[..., 1:, :, :] @ hA
    return look_back(LB.Psi.mT, precision, torch.zeros_like(LB.p @ LB.p.mT)[..., -1:, :, :])


def look_back(back: Tensor, own: Tensor, last: Tensor) -> Tensor:
    """Run ``N_n = N*_n + L_nᵀ N_{n+1} L_n`` and, in further columns, ``r_n = r*_n + L_nᵀ r_{n+1}``, from the last point on.

    :param back: Lᵀ of all points but the last.
    :param own: N* of these points, and r* beside it.
    :param last: N of the last point, and r beside it.
    """
    earlier = prefix((back.flip(-3), own.flip(-3)), last, _compose_carries, _carry_back).flip(-3)
    return torch.cat([earlier, last.expand(*earlier.shape[:-3], *last.shape[-3:])], -3)


def _carry_back(maps: Maps, ahead: Tensor) -> Tensor:
    """N and r of a point from those of the next one."""
    back, own = maps
    carried, S = back @ ahead, back.shape[-1]
    return torch.cat([carried[..., :S] @ back.mT, carried[..., S:]], -1) + own


def _compose_carries(first: Maps, second: Maps) -> Maps:
    """Compose two such maps."""
    return second[0] @ first[0], _carry_back(second, first[1])


def recursion(A: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """States of the linear recursion ``x_n = A_n x_{n−1} + b_n`` from x_0 on, for columns."""
    x = prefix((A, b), start, lambda i, j: (j[0] @ i[0], j[0] @ i[1] + j[1]), lambda i, x: i[0] @ x + i[1])
    return torch.cat([start.expand(*x.shape[:-3], *start.shape[-3:]), x], -3)
