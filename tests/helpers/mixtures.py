"""Mixtures of diagonal Gaussians."""

import torch

from pyro_lvgp.distributions import DiagonalMixture


def make_mixture(C=3, Q=2, *batch):
    return DiagonalMixture(torch.randn(*batch, C), torch.randn(C, Q), 0.3 + torch.rand(C, Q))


def assert_moments_agree(draws, exact):
    """Means of draws along the first dimension, to four standard errors."""
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4.0 * error).all(), (draws.mean(0), exact, error)
