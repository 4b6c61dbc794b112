"""Advised RFLVM: its bound against dense Gaussian densities, its kernel against the spectral mixture, and a fit."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.nn.functional import softplus

from benchmarks.peers.advised_rflvm import AdvisedRFLVM


@pytest.fixture(params=[3, 40], ids=["few columns", "more columns than rows"])
def data(request):
    torch.manual_seed(0)
    return torch.randn(12, request.param, dtype=torch.float64)


@pytest.mark.parametrize("num_draws", [2, 9], ids=["fewer features than rows", "more"])
def test_the_bound_is_a_dense_gaussian_density_less_the_divergence(data, num_draws):
    model = AdvisedRFLVM(data, num_draws=num_draws)
    q = Normal(model.loc, softplus(model.raw_scale))
    torch.manual_seed(1)
    bound = model()
    torch.manual_seed(1)
    features = model.features(q.loc + q.scale * torch.randn_like(q.loc))  # in the memory layout of the principal components
    assert features.shape == (12, 4 * num_draws)
    covariance = features @ features.mT + (softplus(model.raw_noise) + 1e-4) * torch.eye(12, dtype=data.dtype)
    dense = MultivariateNormal(torch.zeros(12, dtype=data.dtype), covariance).log_prob(data.mT).sum()
    expected = dense - kl_divergence(q, Normal(torch.zeros_like(q.loc), torch.ones_like(q.loc))).sum()
    torch.testing.assert_close(bound, expected)
    gradients = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in (bound, expected)]
    for gradient, dense_gradient in zip(*gradients, strict=True):
        assert (dense_gradient != 0.0).all()
        torch.testing.assert_close(gradient, dense_gradient)


@torch.no_grad()
def test_products_of_features_estimate_the_spectral_mixture_kernel(data):
    model = AdvisedRFLVM(data, num_draws=40_000)
    model.mean.copy_(torch.tensor([[0.3, 0.0], [-0.2, 0.5]]))
    model.raw_deviation.fill_(-1.0)
    X = torch.tensor([[0.0, 0.0], [0.4, -0.3], [1.0, 0.8]], dtype=data.dtype)
    tau = X[:, None] - X  # [3, 3, Q]
    weight, variance = softplus(model.raw_weight), softplus(model.raw_deviation).square()
    decay = (-2.0 * math.pi**2 * (tau[..., None, :].square() * variance).sum(-1)).exp()
    kernel = (weight * decay * (2.0 * math.pi * tau @ model.mean.mT).cos()).sum(-1)
    features = model.features(X)
    # The standard error of an entry is below the sum of weights / 40000^½ = 0.005 of it.
    torch.testing.assert_close(features @ features.mT / weight.sum(), kernel / weight.sum(), atol=0.02, rtol=0.0)


def test_a_fit_raises_the_bound_and_rows_have_neighbours_of_their_kind():
    torch.manual_seed(0)
    kind = torch.arange(30) % 2
    Y = torch.randn(2, 6, dtype=torch.float64)[kind] + 0.1 * torch.randn(30, 6, dtype=torch.float64)
    model = AdvisedRFLVM(Y - Y.mean(0))
    before = model.negative_bound()
    model.fit(300, learning_rate=0.02)
    assert model.negative_bound() < before
    distances = torch.cdist(model.latents(), model.latents()).fill_diagonal_(torch.inf)
    assert (kind[distances.argmin(1)] == kind).double().mean() > 0.75  # at least 0.76 in fits of six seeds
