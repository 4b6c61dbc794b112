"""Weights integrated out by L × L factors, against dense Gaussians over the data."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_lvgp.conjugate.feature_regression import (
    function_moments,
    gaussian_log_density,
    gaussian_sites,
    gaussian_weight_posterior,
    log_partition,
    precision_sum,
    profile_log_density,
    weight_posterior,
)
from pyro_lvgp.ops.linalg import function_variance

N, D, L = 7, 3, 4


pytestmark = pytest.mark.usefixtures("float64")


def _observed(holes):
    observed = torch.rand(N, D) < 0.6 if holes else torch.ones(N, D, dtype=torch.bool)
    observed[0] = True
    return observed


def _dense(features, y, observed, variance):
    """Log N(y_d; 0, ΦΦᵀ + σ_d² I) of what is observed, one output at a time."""
    total = []
    for d in range(D):
        Phi = features[observed[:, d]]
        covariance = Phi @ Phi.mT + variance.expand(D)[d] * torch.eye(len(Phi))
        total.append(MultivariateNormal(torch.zeros(len(Phi)), covariance).log_prob(y[observed[:, d], d]))
    return torch.stack(total)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("shared_variance", [False, True])
def test_log_density_and_its_gradients_equal_the_dense_gaussian(holes, shared_variance):
    observed, y = _observed(holes), torch.randn(N, D)
    features = torch.randn(N, L, requires_grad=True)
    variance = (0.2 + torch.rand(1 if shared_variance else D)).requires_grad_()
    fast = gaussian_log_density(features, y, observed, variance)
    slow = _dense(features, y, observed, variance)
    torch.testing.assert_close(fast, slow)
    weights = torch.randn(D)
    for ours, theirs in zip(
        torch.autograd.grad(fast @ weights, [features, variance]),
        torch.autograd.grad(slow @ weights, [features, variance]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_rows", [N, 3])
def test_the_profile_is_the_dense_gaussian_at_its_best_variances(num_rows):
    features = torch.randn(num_rows, L)
    y = 3.0 * features[:, :2] @ torch.randn(2, D) + 0.5 * torch.randn(num_rows, D)
    value, variance, ratio = profile_log_density(features, y)

    def dense(variance, ratio):
        identity = torch.eye(num_rows)
        covariance = variance * (identity + ratio * features @ features.mT)
        return MultivariateNormal(torch.zeros(num_rows), covariance).log_prob(y.mT).sum()

    torch.testing.assert_close(value, dense(variance, ratio))
    for other in (0.9, 1.1):
        assert dense(other * variance, ratio) < value
    for other in torch.logspace(-3.0, 6.0, 19):
        assert dense(variance, other) < value + 1e-6


@pytest.mark.parametrize("holes", [False, True])
def test_posterior_equals_dense_regression(holes):
    observed, y, features, new = _observed(holes), torch.randn(N, D), torch.randn(N, L), torch.randn(5, L)
    variance = torch.tensor([0.3])
    posterior = gaussian_weight_posterior(features, y, observed, variance)
    assert posterior.precision_tril.shape == (D if holes else 1, L, L)
    for ours, slow in zip(posterior, weight_posterior(features, *gaussian_sites(y, observed, variance)), strict=True):
        torch.testing.assert_close(ours, slow)
    mean, f_variance = function_moments(posterior, new)
    for d in range(D):
        Phi = features[observed[:, d]]
        K = Phi @ Phi.mT + variance * torch.eye(len(Phi))
        gain = new @ Phi.mT @ torch.linalg.inv(K)
        torch.testing.assert_close(mean[:, d], gain @ y[observed[:, d], d])
        covariance = new @ new.mT - gain @ Phi @ new.mT
        torch.testing.assert_close(f_variance[:, d if holes else 0], covariance.diagonal())


def test_missing_entries_do_not_matter_whatever_stands_there():
    observed, y, features = _observed(True), torch.randn(N, D), torch.randn(N, L)
    other = torch.where(observed, y, 1e3)
    variance = torch.full((D,), 0.3)
    torch.testing.assert_close(
        gaussian_log_density(features, y, observed, variance), gaussian_log_density(features, other, observed, variance)
    )


def test_log_partition_is_the_integral():
    """On a grid over two weights."""
    features, linear, precision = torch.randn(N, 2), torch.randn(N, D), torch.rand(N, D)
    grid = torch.linspace(-9.0, 9.0, 601)
    a = torch.cartesian_prod(grid, grid)
    f = features @ a.mT
    log_joint = MultivariateNormal(torch.zeros(2), torch.eye(2)).log_prob(a) + (
        linear.mT @ f - 0.5 * precision.mT @ f.square()
    )
    integral = log_joint.logsumexp(-1) + 2.0 * (grid[1] - grid[0]).log()
    torch.testing.assert_close(log_partition(weight_posterior(features, linear, precision)), integral)


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 9])
def test_sums_over_rows_equal_those_of_matrices(num_outputs):
    """With few outputs and with more than half as many as features: values and gradients."""
    features = torch.randn(2, N, L, requires_grad=True)
    precision = torch.rand(N, num_outputs, requires_grad=True)
    fast = precision_sum(features, precision)
    slow = torch.stack([features.mT @ precision[:, d].diag() @ features for d in range(num_outputs)], -3)
    torch.testing.assert_close(fast, slow)
    weights = torch.randn_like(fast)
    for ours, theirs in zip(
        torch.autograd.grad((fast * weights).sum(), [features, precision]),
        torch.autograd.grad((slow * weights).sum(), [features, precision]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 9])
def test_variances_equal_those_of_each_output(num_outputs):
    """With few outputs and with more than half as many as features, of any square root: values and gradients."""
    features, factor = torch.randn(2, N, L, requires_grad=True), torch.randn(num_outputs, L, L, requires_grad=True)
    fast = function_variance(features, factor)
    slow = torch.einsum("bnl,dlk,dmk,bnm->bnd", features, factor, factor, features)
    torch.testing.assert_close(fast, slow)
    weights = torch.randn_like(fast)
    for ours, theirs in zip(
        torch.autograd.grad((fast * weights).sum(), [features, factor]),
        torch.autograd.grad((slow * weights).sum(), [features, factor]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("in_cache", [1, 4 * N * L, 10**9])
def test_moments_do_not_depend_on_how_many_outputs_are_taken_at_once(in_cache, monkeypatch):
    monkeypatch.setattr("pyro_lvgp.ops.linalg._CACHE_SIZE", in_cache)
    features, new = torch.randn(2, N, L), torch.randn(2, 5, L)
    posterior = weight_posterior(features, torch.randn(N, 2), torch.rand(N, 2))
    mean, variance = function_moments(posterior, new)
    covariance = torch.linalg.inv(posterior.precision_tril @ posterior.precision_tril.mT)
    torch.testing.assert_close(variance, torch.einsum("bnl,bdlk,bnk->bnd", new, covariance, new))
    torch.testing.assert_close(mean, torch.einsum("bnl,bdl->bnd", new, posterior.mean))


def test_batches_are_loops():
    features, linear, precision = torch.randn(2, 1, N, L), torch.randn(3, N, D), torch.rand(3, N, D)
    whole = log_partition(weight_posterior(features, linear, precision))
    assert whole.shape == (2, 3, D)
    for i in range(2):
        for j in range(3):
            one = weight_posterior(features[i, 0], linear[j], precision[j])
            torch.testing.assert_close(whole[i, j], log_partition(one))
    torch.testing.assert_close(
        precision_sum(features[0, 0], precision[0])[1], features[0, 0].mT @ precision[0, :, 1].diag() @ features[0, 0]
    )


def test_no_matrix_grows_with_the_square_of_the_rows():
    """A hundred thousand rows, whose kernel matrix would take 80 GB."""
    rows = 100_000
    features, y = torch.randn(rows, 2), torch.randn(rows, 1)
    value = gaussian_log_density(features, y, torch.ones(rows, 1, dtype=torch.bool), torch.ones(1))
    assert value.isfinite().all()
