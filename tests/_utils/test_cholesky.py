"""Cholesky factors with jitter: factors, escalation, gradients and errors."""

import pytest
import torch

from pyro_lvgp._utils.cholesky import NotPositiveDefiniteError, safe_cholesky


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
