"""Kernels of mixtures of spectral densities."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pyro_lvgp.kernels import RBF, mixture_kernel, random_features, spectral_density
from tests.helpers.mixtures import make_mixture

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("Q", [1, 2])
def test_features_converge_to_the_mixture_kernel(Q):
    mixture, X = make_mixture(Q=Q), torch.randn(5, Q)
    exact = mixture_kernel(X, X, mixture.weights, mixture.locs, mixture.scales)
    errors = []
    for num in (100, 100_000):
        features = random_features(X, mixture.sample((num,)))
        torch.testing.assert_close(features.square().sum(-1), torch.ones(5))
        errors.append((features @ features.mT - exact).abs().max())
    assert errors[1] < 0.015
    assert errors[1] < errors[0]


def test_one_component_at_zero_is_an_rbf_kernel():
    lengthscale, X, X2 = torch.tensor([0.7, 2.0]), torch.randn(4, 2), torch.randn(3, 2)
    scales = 1.0 / (2.0 * math.pi * lengthscale)
    kernel = mixture_kernel(X, X2, torch.ones(1), torch.zeros(1, 2), scales[None])
    torch.testing.assert_close(kernel, RBF(2, lengthscale=lengthscale)(X, X2).detach())


def test_kernel_is_the_fourier_transform_of_its_density():
    mixture, tau = make_mixture(Q=1), torch.linspace(-1.0, 1.0, 7)[:, None]
    parts = mixture.weights, mixture.locs, mixture.scales
    omega = torch.linspace(-12.0, 12.0, 4001)[:, None]
    density = spectral_density(omega, *parts)
    torch.testing.assert_close(density, density.flip(0))
    transform = torch.trapezoid(density * torch.cos(2.0 * math.pi * tau * omega.mT), omega[:, 0])
    torch.testing.assert_close(transform, mixture_kernel(tau, torch.zeros(1, 1), *parts)[:, 0])


def test_a_kernel_of_many_components_takes_the_memory_of_one():
    mixture, X = make_mixture(C=64), torch.randn(50, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kernel = mixture_kernel(X, X, mixture.weights, mixture.locs, mixture.scales)
    assert max(event.self_cpu_memory_usage for event in profiler.events()) <= 4 * kernel.nbytes
    tau = X[:, None] - X
    waves = (2.0 * math.pi * tau @ mixture.locs.mT).cos()
    decays = (-2.0 * math.pi**2 * tau.square() @ mixture.scales.square().mT).exp()
    torch.testing.assert_close(kernel, (decays * waves) @ mixture.weights)


def test_a_kernel_of_batches_is_that_of_each():
    weights, locs, scales = torch.rand(4, 3), torch.randn(4, 3, 2), torch.rand(3, 2)
    X, X2 = torch.randn(5, 1, 6, 2), torch.randn(7, 2)
    kernels = mixture_kernel(X, X2, weights, locs, scales)
    each = [[mixture_kernel(x[0], X2, w, m, scales) for w, m in zip(weights, locs, strict=True)] for x in X]
    torch.testing.assert_close(kernels, torch.stack([torch.stack(row) for row in each]))
