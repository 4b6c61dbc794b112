"""EM of factor analysis beside scikit-learn and the likelihood."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import FactorAnalysis

from pyro_lvgp.conjugate.factor_analysis import factor_analysis
from pyro_lvgp.ops.low_rank import factor_posterior, log_prob

pytestmark = pytest.mark.usefixtures("float64")


def sample(N=300, D=6, r=2):
    W, noise = torch.randn(D, r), 0.2 + torch.rand(D)
    Y = torch.randn(N, r) @ W.mT + noise.sqrt() * torch.randn(N, D)
    return Y - Y.mean(0), W, noise


def likelihood(Y, W, noise):
    posterior = factor_posterior(W, noise, ~torch.isnan(Y))
    return log_prob(posterior, torch.nan_to_num(Y)).sum()


def test_complete_data_have_the_likelihood_of_scikit_learn():
    Y, _, _ = sample()
    peer = FactorAnalysis(2, svd_method="lapack", tol=1e-8, max_iter=10_000).fit(Y.numpy())
    W, noise = factor_analysis(Y, 2, num_iterations=1000)
    torch.testing.assert_close(likelihood(Y, W, noise).item() / len(Y), peer.score(Y.numpy()), rtol=1e-6, atol=0.0)
    np.testing.assert_allclose((W @ W.mT + noise.diag()).numpy(), peer.get_covariance(), atol=2e-3)


def test_no_step_lowers_the_likelihood_of_incomplete_data():
    Y, _, _ = sample(N=60)
    Y = Y.masked_fill(torch.rand(Y.shape) < 0.4, torch.nan)
    values = torch.stack([likelihood(Y, *factor_analysis(Y, 2, num_iterations=k)) for k in range(0, 40, 3)])
    assert (values.diff() >= -1e-9).all()


def test_missing_entries_do_not_bias_the_covariance():
    Y, W, noise = sample(N=20_000)
    Y = Y.masked_fill(torch.rand(Y.shape) < 0.4, torch.nan)
    found_W, found_noise = factor_analysis(Y, 2, num_iterations=100)
    want = W @ W.mT + noise.diag()
    scale = want.diagonal().sqrt()
    # Errors of covariances of 20000 · 0.36 pairs.
    assert (((found_W @ found_W.mT + found_noise.diag()) - want) / scale / scale[:, None]).abs().max() < 4.0 * 7200**-0.5


def test_more_factors_than_data_can_have_leave_finite_numbers():
    Y = torch.randn(2, 5)
    Y[:, 4] = 0.0
    W, noise = factor_analysis(Y, 4)
    assert torch.isfinite(W).all()
    assert torch.isfinite(noise[:4]).all()
    assert (noise[:4] > 0.0).all()
    assert (W[4] == 0.0).all()
    assert noise[4] == 0.0
