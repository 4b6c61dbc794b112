"""Linear algebra of sparse Gaussian processes: pure tensor functions that broadcast over leading batch dimensions."""

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "function_variance",
    "invert_lower",
    "pair_products",
    "solve_lower",
    "sparse_conditional",
    "sparse_covariance",
]

_CACHE_SIZE = 2**20  # approximate capacity of a processor's cache, in numbers


def solve_lower(L: Float[Tensor, "*#batch M M"], B: Float[Tensor, "*#batch M N"]) -> Float[Tensor, "*batch M N"]:
    """Solve ``L X = B`` for lower-triangular ``L``, without copies of a single matrix ``L`` over the batch of ``B``.

    :param L: lower-triangular matrices.
    :param B: right-hand sides, in columns.

    >>> solve_lower(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0], [3.0]]))
    tensor([[1.],
            [2.]])
    """
    if L.dim() == 2 and B.dim() > 2:
        columns = B.movedim(-2, 0)  # [M, *batch, N]: the batch of B becomes right-hand sides
        return (
            torch.linalg.solve_triangular(L, columns.reshape(L.shape[-1], -1), upper=False)
            .reshape(columns.shape)
            .movedim(0, -2)
        )
    return torch.linalg.solve_triangular(L, B, upper=False)


def invert_lower(L: Float[Tensor, "*batch M M"]) -> Float[Tensor, "*batch M M"]:
    """Invert lower-triangular ``L``; a product with the inverse is faster than :func:`solve_lower` for many right-hand sides.

    :param L: lower-triangular matrices.

    >>> invert_lower(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    tensor([[ 0.5000,  0.0000],
            [-0.5000,  1.0000]])
    """
    return solve_lower(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device))


def function_variance(
    features: Float[Tensor, "*#batch N L"], factor: Float[Tensor, "*#batch #D L L"]
) -> Float[Tensor, "*batch N #D"]:
    """Compute the variance ``diag(Φ S_d S_dᵀ Φᵀ)`` of each output, whose weights have the covariance ``S_d S_dᵀ``.

    With many outputs, the L (L + 1) / 2 products of two features of each row are computed once for all outputs, and summed by
    one matrix product.  With few outputs, one matrix product for each output has lower cost.

    :param features: Φ.
    :param factor: S, triangular or not.

    >>> function_variance(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.eye(2)[None])
    tensor([[5.],
            [1.]])
    """
    L = features.shape[-1]
    if factor.stride(-3) == 0:  # one factor, expanded
        factor = factor[..., :1, :, :]
    if factor.shape[-3] <= (L + 1) // 2:
        # A few outputs at a time, so that the L × N numbers of each stay in the cache.
        PhiT, num_outputs = features.mT.unsqueeze(-3), max(1, _CACHE_SIZE // features.numel())
        return torch.cat([(S.mT @ PhiT).square().sum(-2) for S in factor.split(num_outputs, -3)], -2).mT
    rows, columns = torch.triu_indices(L, L, device=features.device)
    multiplicity = torch.where(rows == columns, 1.0, 2.0).to(features)
    covariance = multiplicity * (factor @ factor.mT)[..., rows, columns]
    return (pair_products(features) @ covariance.mT).clamp_min(0.0)  # rounding may make a variance negative


def pair_products(features: Float[Tensor, "*batch N L"]) -> Float[Tensor, "*batch N products"]:
    """Compute the products of all pairs of features, in the order of ``torch.triu_indices``.

    :param features: Φ.

    >>> pair_products(torch.tensor([[2.0, 3.0]]))
    tensor([[4., 6., 9.]])
    """
    return torch.cat([features[..., i : i + 1] * features[..., i:] for i in range(features.shape[-1])], -1)


def sparse_conditional(
    Luu: Float[Tensor, "*#batch M M"],
    Kuf: Float[Tensor, "*#batch M N"],
    Kff: Float[Tensor, "*#batch N"],
    u: Float[Tensor, "*#batch D M"],
    u_scale_tril: Float[Tensor, "D M M"] | None = None,
) -> tuple[Float[Tensor, "*#batch N D"], Float[Tensor, "*#batch N d"]]:
    """Compute mean and variance of a function given its whitened inducing outputs u, with inducing values ``Luu u``.

    With ``A = Luu⁻¹ Kuf`` and ``Kuu = Luu Luuᵀ``, output d has mean ``Aᵀ u_d`` and variance ``diag(Kff − AᵀA)``, which is the
    same for every output.  For uncertain ``u ~ N(u_d, L_d L_dᵀ)`` the variance has the further term ``diag(AᵀL_d L_dᵀA)``.

    :param Luu: Cholesky factor of the kernel matrix of the inducing points.
    :param Kuf: kernel between inducing points and inputs.
    :param Kff: variances of the inputs, the diagonal of their kernel matrix.
    :param u: whitened inducing outputs, or their means.
    :param u_scale_tril: Cholesky factors L_d of their covariances, the same for the whole batch.
    :returns: mean [N, D] and variance [N, 1], or [N, D] if u is uncertain.

    Source: Titsias (2009); whitened as in Hensman et al. (2015), "MCMC for variationally sparse Gaussian processes".

    >>> Luu, Kuf = torch.eye(2), torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    >>> sparse_conditional(Luu, Kuf, torch.ones(3), torch.tensor([[2.0, 4.0]]))
    (tensor([[2.],
            [4.],
            [3.]]), tensor([[0.0000],
            [0.0000],
            [0.5000]]))
    """
    Luu_inv_Kuf = solve_lower(Luu, Kuf)
    # Rounding may make a variance negative.
    variance = (Kff - Luu_inv_Kuf.square().sum(-2)).clamp_min(0.0)[..., None]
    if u_scale_tril is not None:
        D, M = u_scale_tril.shape[:2]
        if D > M and D * Luu_inv_Kuf.numel() > _CACHE_SIZE:
            spread = function_variance(Luu_inv_Kuf.mT, u_scale_tril)
        else:  # Lᵀ_d A for all d as one product [D M, M] × [M, batch N]
            columns = Luu_inv_Kuf.movedim(-2, 0)
            LT_A = (u_scale_tril.mT.flatten(0, 1) @ columns.flatten(1)).unflatten(0, (D, M))
            spread = torch.linalg.vecdot(LT_A, LT_A, dim=1).unflatten(1, columns.shape[1:]).movedim(0, -1)
        variance = variance + spread
    return Luu_inv_Kuf.mT @ u.mT, variance


def sparse_covariance(
    Luu: Float[Tensor, "*#batch M M"], Kuf: Float[Tensor, "*#batch M N"], Kff: Float[Tensor, "*#batch N N"]
) -> Float[Tensor, "*batch N N"]:
    """Compute the covariance ``Kff − AᵀA`` of the function at N inputs given its inducing outputs, the same for every output.

    :param Luu: Cholesky factor of the kernel matrix of the inducing points.
    :param Kuf: kernel between inducing points and inputs.
    :param Kff: kernel matrix of the inputs.

    >>> sparse_covariance(torch.eye(1), torch.tensor([[0.5, 0.5]]), torch.eye(2))
    tensor([[ 0.7500, -0.2500],
            [-0.2500,  0.7500]])
    """
    Luu_inv_Kuf = solve_lower(Luu, Kuf)
    return Kff - Luu_inv_Kuf.mT @ Luu_inv_Kuf
