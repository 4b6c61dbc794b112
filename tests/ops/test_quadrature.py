"""Nodes and weights of Gauss-Hermite quadrature against numpy's."""

import numpy as np
import pytest
import torch

from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp.ops.quadrature import gauss_hermite, normal_nodes


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
