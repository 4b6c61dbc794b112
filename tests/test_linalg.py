import pytest
import torch

from pyro_lvgp.linalg import NotPositiveDefiniteError, safe_cholesky, solve_lower, sparse_conditional


def _covariance(*batch, size=6, dtype=torch.float64):
    A = torch.randn(*batch, size, size, dtype=dtype)
    return A @ A.mT + torch.eye(size, dtype=dtype)


def test_cholesky_factor(dtype):
    K = _covariance(3, dtype=dtype)
    L = safe_cholesky(K)
    assert L.dtype == dtype
    torch.testing.assert_close(L @ L.mT, K, rtol=1e-4 if dtype == torch.float32 else 1e-7, atol=0.0)


def test_jitter_escalates_only_where_needed():
    good, singular = _covariance(size=2), torch.tensor([[1.0, 1.0], [1.0, 1.0 - 1e-7]], dtype=torch.float64)
    L = safe_cholesky(torch.stack([good, singular]))
    torch.testing.assert_close(L[0] @ L[0].mT, good, rtol=1e-7, atol=0.0)
    jitter = (L[1] @ L[1].mT)[0, 0] - 1.0
    assert 5e-8 < jitter < 2e-4


def test_gradient_passes_through_the_jitter():
    K = torch.ones(3, 3, dtype=torch.float64).requires_grad_()
    safe_cholesky(K).diagonal().log().sum().backward()
    assert K.grad.isfinite().all()


def test_error_names_matrix_size_and_parameters():
    with pytest.raises(NotPositiveDefiniteError, match=r"Kuu \[2 × 2\] at lengthscale=3: .*float64"):
        safe_cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), name="Kuu", describe=lambda: "lengthscale=3")
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        safe_cholesky(torch.full((2, 2), torch.nan))


def test_solve_lower_folds_the_batch():
    L, B = safe_cholesky(_covariance()), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(solve_lower(L, B), torch.linalg.inv(L) @ B)
    Ls = safe_cholesky(_covariance(3))
    torch.testing.assert_close(solve_lower(Ls, B), torch.linalg.inv(Ls) @ B)


def test_sparse_conditional_against_dense_gaussian_conditioning(dtype):
    K = _covariance(2, size=9, dtype=dtype)  # 4 inducing points, 5 inputs, batch of 2
    Kuu, Kuf, Kff = K[:, :4, :4], K[:, :4, 4:], K[:, 4:, 4:]
    u = torch.randn(2, 4, 3, dtype=dtype)
    Luu = torch.linalg.cholesky(Kuu)
    expected_mean = Kuf.mT @ torch.linalg.solve(Kuu, Luu @ u)
    expected_cov = Kff - Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    mean, cov = sparse_conditional(Luu, Kuf, Kff, u, full_cov=True)
    torch.testing.assert_close(mean, expected_mean, **tolerance)
    torch.testing.assert_close(cov, expected_cov, **tolerance)
    mean, variance = sparse_conditional(Luu, Kuf, Kff.diagonal(dim1=-2, dim2=-1), u)
    torch.testing.assert_close(mean, expected_mean, **tolerance)
    torch.testing.assert_close(variance, expected_cov.diagonal(dim1=-2, dim2=-1), **tolerance)


def test_sparse_conditional_is_certain_at_the_inducing_points():
    K = _covariance()
    mean, variance = sparse_conditional(torch.linalg.cholesky(K), K, K.diagonal(), torch.ones(6, 1, dtype=torch.float64))
    assert (variance >= 0).all()
    assert variance.max() < 1e-12
    torch.testing.assert_close(mean, torch.linalg.cholesky(K).sum(-1, keepdim=True))
