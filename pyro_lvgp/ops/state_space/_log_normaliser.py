r"""Log normalisers of Gauss–Markov processes under Gaussian sites, with the derivatives of a smoother.

Let m and P be the mean and the covariance of the state :math:`x_n` given the sites before n, and let the site make them
:math:`m'` and F.  The derivative r of log Z with respect to m, and minus the second derivative N, follow a linear recursion
from the last point to the first, in which L maps the state before a site to that before the next one,

.. math:: r_n = r^*_n + L_n^T r_{n+1}, \qquad N_n = N^*_n + L_n^T N_{n+1} L_n .

All other derivatives are computed from them point by point,

.. math::

    \frac{\partial \log Z}{\partial Q_n} = G_{n+1} = \tfrac12 \big(r_{n+1} r_{n+1}^T - N_{n+1}\big), \qquad
    \frac{\partial \log Z}{\partial A_n} = r_{n+1} m_n'^T + 2 G_{n+1} A_n F_n, \qquad
    E x_n = m'_n + F_n A_n^T r_{n+1}, \qquad \operatorname{cov} x_n = F_n - F_n A_n^T N_{n+1} A_n F_n .

So one scan of products replaces the derivatives of the forward scan, in which each pair of neighbours solves a linear system.
No covariance is inverted, so that inputs may coincide.

Source: Särkkä and García-Fernández (2021), "Temporal parallelization of Bayesian smoothers", for the covariances; Durbin and
Koopman (2012), sections 4.5 and 7.3, for the backward recursions and the derivatives.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_lvgp.ops.state_space._kalman import (
    KalmanFilter,
    factorise,
    look_back,
    predicted_covariances,
    predicted_states,
    recursion,
    run_filter,
)
from pyro_lvgp.ops.state_space.models import StateSpaceModel

__all__ = ["log_normaliser_of_coupled", "log_normaliser_of_scalar"]

_ZERO_FIRST, _ZERO_LAST = (0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 1)  # paddings of the dimension of points


def log_normaliser_of_coupled(P: Tensor, A: Tensor, Q: Tensor, J: Tensor, j: Tensor) -> Tensor:
    """Compute ``log Z`` of sites ``exp(jᵀx − ½ xᵀJx)``; shapes are those of :class:`_CoupledSites`."""
    rows = _num_added(P)
    square = (0, rows, 0, rows)
    return _CoupledSites.apply(*(pad(part, square) for part in (P, A, Q, J)), pad(j, (0, 0, 0, rows)))


def log_normaliser_of_scalar(P: Tensor, A: Tensor, Q: Tensor, h: Tensor, W: Tensor, c: Tensor) -> Tensor:
    """Compute ``log Z`` of sites ``exp(−½ (c − W hᵀx)²)``; shapes are those of :class:`_ScalarSites`."""
    rows = _num_added(P)
    return _ScalarSites.apply(*(pad(part, (0, rows, 0, rows)) for part in (P, A, Q)), pad(h, (0, rows)), W, c)


def _num_added(P: Tensor) -> int:
    """Number of states to add that are constantly zero: one for seven states on a CPU.

    PyTorch multiplies batches of matrices in a loop if two of them take fewer than 400 products, as for seven rows.  The loop
    takes two to four times as long as the BLAS library for eight rows.
    """
    return int(P.shape[-1] == 7 and P.device.type == "cpu")


class _CoupledSites(torch.autograd.Function):
    """``log Z`` [*batch, R] of sites ``exp(jᵀx − ½ xᵀJx)`` for R columns j.

    Inputs are P [*batch, S, S], A and Q [*batch, T, S, S], J [*batch, N, S, S] and j [*batch, N, S, R].  With ``M = I + P J``,
    ``F = M⁻¹ P``, ``r* = M⁻ᵀ (j − J m)``, ``N* = M⁻ᵀ J`` and ``L = A M⁻¹``.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        value, *terms = _condition_on_coupled(*inputs)
        ctx.save_for_backward(*inputs, *terms)
        return value

    @staticmethod
    def backward(ctx: Any, value_bar: Tensor) -> tuple[Tensor | None, ...]:
        inputs, (LU, pivots, F, mean, residual) = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, _condition_on_coupled(*inputs).value, inputs, value_bar)
        _, A, _, J, _ = inputs
        right = torch.cat([J, residual, pad(A.mT, _ZERO_LAST)], -1)
        solved = torch.linalg.lu_solve(LU, pivots, right, adjoint=True)
        own, back = solved.split([solved.shape[-1] - J.shape[-1], J.shape[-1]], -1)
        ahead = _look_ahead(own, back[..., :-1, :, :], A, F, mean, value_bar)
        smoothed = mean + F @ ahead.r
        J_bar = -0.5 * (ahead.total * (F - F @ ahead.N @ F) + (ahead.weight * smoothed) @ smoothed.mT)
        return *ahead.derivatives, J_bar, ahead.weight * smoothed


class _CoupledTerms(NamedTuple):
    """``log Z``, factors of M, F, and the means m′ with the residuals j − J m."""

    value: Tensor
    LU: Tensor
    pivots: Tensor
    F: Tensor
    mean: Tensor
    residual: Tensor


def _condition_on_coupled(P: Tensor, A: Tensor, Q: Tensor, J: Tensor, j: Tensor) -> _CoupledTerms:
    first = P[..., None, :, :]
    predicted = torch.cat([first, predicted_covariances(A, Q, first, J)], -3)
    M = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) + predicted @ J
    LU, pivots, _ = torch.linalg.lu_factor_ex(M)
    F = torch.linalg.lu_solve(LU, pivots, predicted)
    transition = torch.linalg.lu_solve(LU[..., 1:, :, :], pivots[..., 1:, :], A)
    gain = F @ j
    mean = recursion(transition, gain[..., 1:, :, :], gain[..., :1, :, :])
    m = pad(A @ mean[..., :-1, :, :], _ZERO_FIRST)
    # log ∫ N(x; m, P) exp(jᵀx − ½ xᵀJx) dx of each site
    residual = j - J @ m
    squares = (j + residual) * m + residual * (F @ residual)
    half_log_det = 0.5 * LU.diagonal(dim1=-2, dim2=-1).abs().log().sum((-2, -1))
    return _CoupledTerms(0.5 * squares.sum((-3, -2)) - half_log_det[..., None], LU, pivots, F, mean, residual)


class _ScalarSites(torch.autograd.Function):
    """``log Z`` [*batch, R] of sites ``exp(−½ (c − W hᵀx)²)`` for R columns c.

    Inputs are P [*batch, S, S], A and Q [*batch, T, S, S], h [*batch, S], W [*batch, N] and c [*batch, N, 1, R].  The terms
    are those of :class:`~pyro_lvgp.ops.state_space._kalman.KalmanFilter`, which are accurate for sites of any precision: with
    innovations v, ``r* = W h v / s``, ``N* = W² h hᵀ / s`` and ``L = A (I − W k hᵀ)``.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        value, predicted, LB, mean, residual = _condition_on_scalar(*inputs)
        ctx.save_for_backward(*inputs, predicted, LB.s, LB.p, LB.k, mean, residual)
        return value

    @staticmethod
    def backward(ctx: Any, value_bar: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:6]
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, _condition_on_scalar(*inputs).value, inputs, value_bar)
        saved = [part.double() for part in ctx.saved_tensors]
        _, A, _, h, W, _, predicted, s, p, k, mean, residual = saved
        h, W = h[..., None, :, None], W[..., None, None]
        F = predicted - s * k @ k.mT
        own = W * h @ torch.cat([(W / s) * h.mT, residual], -1)
        back = A.mT - (W[..., :-1, :, :] * h) @ (k[..., :-1, :, :].mT @ A.mT)
        ahead = _look_ahead(own, back, A, F, mean, value_bar.double())
        smoothed, alpha = mean + F @ ahead.r, residual - k.mT @ ahead.r
        covariance_h = p - F @ (ahead.N @ p)
        f, variance = h.mT @ smoothed, h.mT @ p - p.mT @ ahead.N @ p
        along = ahead.weight * alpha
        W_bar = (along * f).sum(-1, keepdim=True) - ahead.total * W * variance
        h_bar = W * (smoothed @ along.mT - ahead.total * W * covariance_h)
        bars = *ahead.derivatives, h_bar.sum(-3).squeeze(-1), W_bar[..., 0, 0], -along
        return tuple(bar.to(value_bar) for bar in bars)


class _ScalarTerms(NamedTuple):
    """``log Z``, covariances P of all points, the filter, the means m′, and innovations divided by s."""

    value: Tensor
    predicted: Tensor
    LB: KalmanFilter
    mean: Tensor
    residual: Tensor


def _condition_on_scalar(P: Tensor, A: Tensor, Q: Tensor, h: Tensor, W: Tensor, c: Tensor) -> _ScalarTerms:
    model = StateSpaceModel(P, A, Q, h)
    predicted = predicted_states(model, W)
    LB = factorise(model, W, predicted)
    mean, residual = run_filter(model, LB, c)
    value = -0.5 * (LB.s * residual.square() + LB.s.log()).sum((-3, -2))
    return _ScalarTerms(value, predicted, LB, mean, residual)


class _Ahead(NamedTuple):
    """Information about each state from the sites after it, and the derivatives of the transitions.

    :param N: precision of the state, zero at the last point.
    :param r: slope of log Z in the mean of the state.
    :param derivatives: with respect to P, A and Q.
    :param weight: derivatives of the columns, to be summed over.
    :param total: their sum.
    """

    N: Tensor
    r: Tensor
    derivatives: tuple[Tensor, Tensor, Tensor]
    weight: Tensor
    total: Tensor


def _look_ahead(own: Tensor, back: Tensor, A: Tensor, F: Tensor, mean: Tensor, value_bar: Tensor) -> _Ahead:
    """Run the recursion of r and N from the last point to the first.

    :param own: N* and r*, side by side.
    :param back: Lᵀ of all points but the last.
    """
    N, r = look_back(back, own[..., :-1, :, :], own[..., -1:, :, :]).split([F.shape[-1], mean.shape[-1]], -1)
    weight, total = value_bar[..., None, None, :], value_bar.sum(-1)[..., None, None, None]
    weighted = weight * r
    G = 0.5 * (weighted @ r.mT - total * N)
    A_bar = weighted[..., 1:, :, :] @ mean[..., :-1, :, :].mT + 2.0 * G[..., 1:, :, :] @ A @ F[..., :-1, :, :]
    N_after, r_after = (pad(part, _ZERO_LAST) for part in (A.mT @ N[..., 1:, :, :] @ A, A.mT @ r[..., 1:, :, :]))
    return _Ahead(N_after, r_after, (G[..., 0, :, :], A_bar, G[..., 1:, :, :]), weight, total)


def _differentiable_gradients(
    ctx: Any, value: Tensor, inputs: tuple[Tensor, ...], value_bar: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients for second derivatives, which need the terms as functions of the inputs."""
    needed = [part for part, is_needed in zip(inputs, ctx.needs_input_grad, strict=True) if is_needed]
    gradients = iter(torch.autograd.grad(value, needed, value_bar, create_graph=True))
    return tuple(next(gradients) if is_needed else None for is_needed in ctx.needs_input_grad)
