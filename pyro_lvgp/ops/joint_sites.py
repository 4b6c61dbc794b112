r"""Several Gaussian processes under sites that couple them, from dense matrices.

A linear decoder with Gaussian noise turns the data of a point into a site of all Q processes together,

.. math:: \ell_n(f_n) = \exp\big(h_n^T f_n - \tfrac12 f_n^T \Lambda_n f_n\big) .

The derivatives of the log normaliser are the posterior moments, :math:`E f_n = \partial \log Z / \partial h_n` and
:math:`E f_n f_n^T = -2\, \partial \log Z / \partial \Lambda_n`, so that one backward pass computes the moments and the
gradients of all kernel parameters.
"""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["joint_log_normaliser"]


def joint_log_normaliser(
    K: Float[Tensor, "Q N N"], linear: Float[Tensor, "N Q"], precision: Float[Tensor, "N Q Q"]
) -> Float[Tensor, ""]:
    r"""Compute ``log Z = log ∫ p(f) Π_n ℓ_n(f_n) df`` for independent processes, in O((N Q)³).

    .. math:: \log Z = \tfrac12 h^T (I + K \Lambda)^{-1} K h - \tfrac12 \log |I + K \Lambda|

    No matrix is inverted that could be singular, so that a site without information has zeros.

    :param K: covariance matrix of each process.
    :param linear: h of each point.
    :param precision: Λ of each point.

    Source: Rasmussen and Williams (2006), eq. 3.32, with coupled sites.

    >>> joint_log_normaliser(torch.eye(1)[None], torch.tensor([[2.0]]), torch.tensor([[[1.0]]]))  # ½ · 4 / 2 − ½ log 2
    tensor(0.6534)
    """
    Q, N, _ = K.shape
    # Λ as a matrix over (process, point), whose blocks are diagonal over points
    coupled = torch.diag_embed(precision.permute(1, 2, 0)).permute(0, 2, 1, 3)
    K_precision = torch.einsum("qnm,qmrl->qnrl", K, coupled).reshape(Q * N, Q * N)
    K_linear = (K @ linear.mT[..., None]).reshape(Q * N, 1)
    LU, pivots = torch.linalg.lu_factor(torch.eye(Q * N, dtype=K.dtype, device=K.device) + K_precision)
    square = (linear.mT.reshape(1, -1) @ torch.linalg.lu_solve(LU, pivots, K_linear)).squeeze()
    return 0.5 * square - 0.5 * LU.diagonal().abs().log().sum()
