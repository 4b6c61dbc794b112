import pytest
import torch

from pyro_lvgp.ops.linalg import solve_lower, sparse_conditional, sparse_covariance


def _covariance(*batch, size=6, dtype=torch.float64):
    A = torch.randn(*batch, size, size, dtype=dtype)
    return A @ A.mT + torch.eye(size, dtype=dtype)


def test_solve_lower_folds_the_batch():
    L, B = torch.linalg.cholesky(_covariance()), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(solve_lower(L, B), torch.linalg.inv(L) @ B)
    Ls = torch.linalg.cholesky(_covariance(3))
    torch.testing.assert_close(solve_lower(Ls, B), torch.linalg.inv(Ls) @ B)


def test_sparse_conditional_against_dense_gaussian_conditioning(dtype):
    K = _covariance(2, size=9, dtype=dtype)  # 4 inducing points, 5 inputs, batch of 2
    Kuu, Kuf, Kff = K[:, :4, :4], K[:, :4, 4:], K[:, 4:, 4:]
    u = torch.randn(2, 3, 4, dtype=dtype)
    Luu = torch.linalg.cholesky(Kuu)
    expected_mean = Kuf.mT @ torch.linalg.solve(Kuu, Luu @ u.mT)
    expected_cov = Kff - Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(sparse_covariance(Luu, Kuf, Kff), expected_cov, **tolerance)
    mean, variance = sparse_conditional(Luu, Kuf, Kff.diagonal(dim1=-2, dim2=-1), u)
    torch.testing.assert_close(mean, expected_mean, **tolerance)
    torch.testing.assert_close(variance[..., 0], expected_cov.diagonal(dim1=-2, dim2=-1), **tolerance)


@pytest.mark.parametrize(("D", "in_cache"), [(3, 2**20), (6, 2**20), (6, 0)])
def test_sparse_conditional_of_uncertain_inducing_outputs(dtype, D, in_cache, monkeypatch):
    """Each output and input on its own: Aᵀ S_d A added to the variance; of many, by products of two features."""
    monkeypatch.setattr("pyro_lvgp.ops.linalg._CACHE_SIZE", in_cache)
    K = _covariance(2, size=7, dtype=dtype)
    Luu, Kuf, Kff = torch.linalg.cholesky(K[:, :4, :4]), K[:, :4, 4:], K[:, 4:, 4:].diagonal(dim1=-2, dim2=-1)
    u, L = torch.randn(D, 4, dtype=dtype), torch.linalg.cholesky(_covariance(D, size=4, dtype=dtype))
    _, known = sparse_conditional(Luu, Kuf, Kff, u)
    _, variance = sparse_conditional(Luu, Kuf, Kff, u, L)
    A = torch.linalg.inv(Luu) @ Kuf
    for b in range(2):
        for d in range(D):
            for n in range(3):
                spread = A[b, :, n] @ L[d] @ L[d].mT @ A[b, :, n]
                torch.testing.assert_close(variance[b, n, d], known[b, n, 0] + spread, rtol=1e-4, atol=1e-5)


def test_sparse_conditional_is_certain_at_the_inducing_points():
    K = _covariance()
    L = torch.linalg.cholesky(K)
    mean, variance = sparse_conditional(L, K, K.diagonal(), torch.ones(1, 6, dtype=torch.float64))
    assert (variance >= 0).all()
    assert variance.max() < 1e-12
    torch.testing.assert_close(mean, L.sum(-1, keepdim=True))
