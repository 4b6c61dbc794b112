"""Terms of a Gaussian posterior under Gaussian sites, with one joint backward function."""

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.ops.linalg import solve_lower

__all__ = ["Conditioning"]


class Conditioning(torch.autograd.Function):
    r"""B⁻¹c, the shift K W B⁻¹ c of the mean, the reduction r = diag(K W B⁻¹ W K) of the variance, ½ log|B| and L_B.

    The joint gradient takes one triangular solve and one product of N × N matrices, fewer than the gradients of the single
    operations.  With :math:`A = B^{-1} W K` and bars for derivatives of the loss,

    .. math::

        \bar B = \tfrac12 \bar h B^{-1} - A \, \mathrm{diag}(\bar r) A^T - \tfrac12 (u \alpha^T + \alpha u^T), \qquad
        B^{-1} = I - A W, \qquad u = B^{-1} \bar\alpha,

    to which r adds :math:`2 W A \, \mathrm{diag}(\bar r)` in :math:`\bar K`, besides :math:`W \bar B W`.
    """

    @staticmethod
    def forward(K, W, c, cholesky):
        WK = W[..., :, None] * K
        B = WK * W[..., None, :]
        B.diagonal(dim1=-2, dim2=-1).add_(1.0)
        LB = cholesky(B)
        alpha = torch.cholesky_solve(c[..., None], LB)
        LB_inv_WK = solve_lower(LB, WK)
        half_log_det = LB.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        shift = (WK.mT @ alpha).squeeze(-1)
        return alpha.squeeze(-1), shift, LB_inv_WK.square().sum(-2), half_log_det, LB, LB_inv_WK

    @staticmethod
    def setup_context(ctx, inputs, output):
        K, W, *_ = inputs
        alpha, *_, LB, LB_inv_WK = output
        ctx.mark_non_differentiable(LB_inv_WK)
        ctx.save_for_backward(K, W, alpha, LB, LB_inv_WK)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, alpha_bar, shift_bar, reduction_bar, half_log_det_bar, LB_bar, _):
        K, W, alpha, LB, LB_inv_WK = ctx.saved_tensors
        zero, alpha = torch.zeros_like(W), alpha[..., None]
        alpha_bar, shift_bar, reduction_bar = (zero if x is None else x for x in (alpha_bar, shift_bar, reduction_bar))
        left, right, r = W[..., :, None], W[..., None, :], reduction_bar[..., None, :]
        if torch.is_grad_enabled():  # second derivatives need A as a function of K and W
            A = torch.cholesky_solve(left * K, LB)
        else:
            A = torch.linalg.solve_triangular(LB.mT, LB_inv_WK, upper=True)
        K_shift = K @ shift_bar[..., None]
        u = torch.cholesky_solve(alpha_bar[..., None] + left * K_shift, LB)

        h = zero[..., :1] if half_log_det_bar is None else 0.5 * half_log_det_bar[..., None]
        inner = r.mT * A.mT
        inner.diagonal(dim1=-2, dim2=-1).add_(h * W)
        B_bar = -0.5 * (torch.cat([u, alpha], -1) @ torch.cat([alpha, u], -1).mT)
        B_bar.sub_(A @ inner).diagonal(dim1=-2, dim2=-1).add_(h)
        if LB_bar is not None:
            B_bar = B_bar + _cholesky_backward(LB, LB_bar)

        half = (B_bar * right).addcmul_(A, r)
        W_bar = 2.0 * (half * K).sum(-1) + (alpha * K_shift).squeeze(-1)
        K_bar = (torch.addcmul(half, A, r) * left).add_((left * alpha) * shift_bar[..., None, :])
        return K_bar, W_bar, u.squeeze(-1), None


def _cholesky_backward(L: Float[Tensor, "*batch N N"], L_bar: Float[Tensor, "*batch N N"]) -> Float[Tensor, "*batch N N"]:
    """Gradient of a symmetric matrix, given the gradient of its Cholesky factor L.

    Source: Murray (2016), "Differentiation of the Cholesky decomposition", eq. 10.
    """
    inner = (L.mT @ L_bar).tril()
    inner.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    inner = torch.linalg.solve_triangular(L.mT, inner + inner.mT, upper=True)  # L⁻ᵀ Φ
    return 0.5 * torch.linalg.solve_triangular(L, inner, upper=False, left=False)
