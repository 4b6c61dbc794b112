"""Linear algebra of sparse Gaussian processes: pure tensor functions that broadcast over leading batch dimensions."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._compile.recording import assume

FIRST_JITTER = {torch.float64: 1e-8, torch.float32: 1e-5}
_NUM_TRIES, _NUM_IN_CACHE = 5, 2**20


class NotPositiveDefiniteError(ValueError):
    """A covariance matrix has no Cholesky factor, even with the largest jitter allowed."""


def safe_cholesky(
    K: Float[Tensor, "*batch M M"],
    *,
    jitter: float | None = None,
    name: str = "covariance",
    describe: Callable[[], str] | None = None,
) -> Float[Tensor, "*batch M M"]:
    """Lower Cholesky factor of ``K`` plus the smallest jitter that makes it positive definite.

    Jitter is relative to the mean of the diagonal.  It starts at ``jitter`` and grows tenfold, for the matrices of the
    batch that fail and for no others, at most four times.

    :param K: symmetric matrices.
    :param jitter: first jitter; 1e-8 in float64 and 1e-5 in float32 by default.  After 0 comes the default.
    :param name: what to call the matrix in an error.
    :param describe: gives the kernel's parameters, to show in an error.
    :raises NotPositiveDefiniteError: if ``K`` holds a NaN or infinity, or the largest jitter does not suffice.

    >>> safe_cholesky(torch.ones(2, 2, dtype=torch.float64)).shape
    torch.Size([2, 2])
    """
    smallest = FIRST_JITTER.get(K.dtype, 1e-5)
    first = smallest if jitter is None else jitter
    scale = K.diagonal(dim1=-2, dim2=-1).mean(-1)
    eps = torch.full_like(scale, first)
    for attempt in range(_NUM_TRIES):
        plain = attempt == 0 and first == 0.0
        jittered = K if plain else K + torch.diag_embed((eps * scale)[..., None].expand(K.shape[:-1]))
        L, info = torch.linalg.cholesky_ex(jittered)
        failed = info > 0
        if assume(~failed.any()):
            return L
        eps = torch.where(failed, (10 * eps).clamp_min(smallest), eps)
    at = f" at {describe()}" if describe is not None else ""
    if not torch.isfinite(K).all():
        raise NotPositiveDefiniteError(
            f"Cholesky of {name} [{_shape(K)}]{at}: expected finite entries, got NaN or infinity. "
            "Try a smaller learning rate, and check the inputs of the kernel for NaN."
        )
    raise NotPositiveDefiniteError(
        f"Cholesky of {name} [{_shape(K)}]{at}: expected a positive definite matrix, but it is not even with jitter "
        f"{float(eps.max()) / 10:.0e} times its mean diagonal. Try float64, fewer or more distinct points, shorter "
        "lengthscales, or a larger jitter."
    )


def solve_lower(L: Float[Tensor, "*#batch M M"], B: Float[Tensor, "*#batch M N"]) -> Float[Tensor, "*batch M N"]:
    """``L⁻¹ B`` for lower-triangular ``L``; one matrix ``L`` is never copied over the batch of ``B``.

    :param L: lower-triangular matrices.
    :param B: right-hand sides, in columns.

    >>> solve_lower(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0], [3.0]]))
    tensor([[1.],
            [2.]])
    """
    if L.dim() == 2 and B.dim() > 2:
        columns = B.movedim(-2, 0)  # [M, *batch, N]: the batch of B is only more right-hand sides
        return (
            torch.linalg.solve_triangular(L, columns.reshape(L.shape[-1], -1), upper=False)
            .reshape(columns.shape)
            .movedim(0, -2)
        )
    return torch.linalg.solve_triangular(L, B, upper=False)


def invert_lower(L: Float[Tensor, "*batch M M"]) -> Float[Tensor, "*batch M M"]:
    """``L⁻¹`` for lower-triangular ``L``: cheaper than solving where there are many more right-hand sides than M.

    :param L: lower-triangular matrices.

    >>> invert_lower(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    tensor([[ 0.5000,  0.0000],
            [-0.5000,  1.0000]])
    """
    return solve_lower(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device))


def function_variance(
    features: Float[Tensor, "*#batch N L"], factor: Float[Tensor, "*#batch #D L L"]
) -> Float[Tensor, "*batch N #D"]:
    """``diag(Φ S_d S_dᵀ Φᵀ)`` of each output, whose weights have the covariance ``S_d S_dᵀ``.

    With many outputs the products of two features are formed once for all of them, L (L + 1) / 2 for each row, and one matrix
    product gives the sums; with few outputs a product of matrices for each is less work.

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
        # A few outputs at a time: D × L × N numbers at once would take longer to fetch than to compute.
        PhiT, few = features.mT.unsqueeze(-3), max(1, _NUM_IN_CACHE // features.numel())
        return torch.cat([(S.mT @ PhiT).square().sum(-2) for S in factor.split(few, -3)], -2).mT
    rows, columns = torch.triu_indices(L, L, device=features.device)
    twice = torch.where(rows == columns, 1.0, 2.0).to(features)
    covariance = twice * (factor @ factor.mT)[..., rows, columns]
    return (pair_products(features) @ covariance.mT).clamp_min(0.0)  # less than none by rounding only


def pair_products(features: Float[Tensor, "*batch N L"]) -> Float[Tensor, "*batch N products"]:
    """Of each two features, in the order of ``torch.triu_indices``.

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
    """Mean and variance of a function given its whitened inducing outputs (inducing values ``Luu u``, ``Kuu = Luu Luuᵀ``).

    With ``A = Luu⁻¹ Kuf``, output d has mean ``Aᵀ u_d`` and variance ``diag(Kff − AᵀA)``, the same for every output; if u is
    ``N(u_d, L_d L_dᵀ)`` rather than known, ``diag(AᵀL_d L_dᵀA)`` is added.

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
    # Kff ≥ diag(AᵀA) exactly; rounding may say otherwise.
    variance = (Kff - Luu_inv_Kuf.square().sum(-2)).clamp_min(0.0)[..., None]
    if u_scale_tril is not None:
        D, M = u_scale_tril.shape[:2]
        if D > M and D * Luu_inv_Kuf.numel() > _NUM_IN_CACHE:
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
    """Covariance ``Kff − AᵀA`` of the function at N inputs given its inducing outputs, the same for every output.

    :param Luu: Cholesky factor of the kernel matrix of the inducing points.
    :param Kuf: kernel between inducing points and inputs.
    :param Kff: kernel matrix of the inputs.

    >>> sparse_covariance(torch.eye(1), torch.tensor([[0.5, 0.5]]), torch.eye(2))
    tensor([[ 0.7500, -0.2500],
            [-0.2500,  0.7500]])
    """
    Luu_inv_Kuf = solve_lower(Luu, Kuf)
    return Kff - Luu_inv_Kuf.mT @ Luu_inv_Kuf


def _shape(K: Tensor) -> str:
    return " × ".join(map(str, K.shape))
