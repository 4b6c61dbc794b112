"""Nodes and weights of Gauss-Hermite quadrature against numpy's, and derivatives of expectations against closed forms."""

import numpy as np
import pytest
import torch

from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp.ops.quadrature import gauss_hermite, log_expectation_derivatives, normal_nodes


@pytest.mark.parametrize("num_points", [1, 2, 3, 7, 20, 33, 80, 150])
def test_nodes_and_weights_are_those_of_numpy(num_points):
    nodes, weights = normal_nodes(num_points)
    t, w = np.polynomial.hermite.hermgauss(num_points)
    np.testing.assert_allclose(nodes, np.sqrt(2.0) * t, rtol=0.0, atol=1e-13)
    np.testing.assert_allclose(weights, w / np.sqrt(np.pi), rtol=1e-12, atol=0.0)


def test_nodes_are_computed_while_operations_are_recorded():
    normal_nodes.cache_clear()
    mean = torch.zeros(2)
    graph = record_pure(lambda mean: [gauss_hermite(torch.cos, mean, torch.ones(2))], [mean])
    torch.testing.assert_close(graph(mean)[0], torch.full((2,), np.exp(-0.5)))


@pytest.mark.parametrize("precision", [1e-4, 1.0, 1e5])
@pytest.mark.parametrize("variance", [0.0, 1e-6, 1.0, 100.0])
def test_derivatives_of_normal_densities_keep_their_digits(precision, variance):
    """In single precision, for functions that are known much better, and much worse, than the datum tells them."""
    mean = torch.linspace(-3.0, 3.0, 7) * (variance + 1.0 / precision) ** 0.5
    total = torch.tensor(variance + 1.0 / precision)
    value, first, second = log_expectation_derivatives(
        lambda f: -0.5 * precision * f.square(),
        lambda f: (-precision * f, torch.full_like(f, -precision)),
        mean,
        torch.tensor(variance),
        torch.zeros(()),
    )
    torch.testing.assert_close(value, -0.5 * (np.log1p(precision * variance) + mean.square() / total), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, -mean / total, rtol=1e-4, atol=1e-6 * total.rsqrt().item())
    torch.testing.assert_close(second, (-1.0 / total).expand(7), rtol=1e-4, atol=0.0)
