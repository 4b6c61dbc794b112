import math

import torch

from pyro_lvgp.kernels import Cosine, Matern
from pyro_lvgp.ops import gaussian_sites, state_space


def test_values_are_those_of_the_formula(float64):
    X, Z = torch.rand(4, 2), torch.rand(5, 2)
    period = torch.tensor([0.7, 1.9])
    kernel = Cosine(2, period=period, variance=1.5)
    expected = 1.5 * torch.cos(2.0 * math.pi * (X[:, None] - Z) / period).prod(-1)
    torch.testing.assert_close(kernel(X, Z).detach(), expected)
    torch.testing.assert_close(kernel.diagonal(X).detach(), torch.full((4,), 1.5))


def test_matrices_are_positive_semidefinite(float64):
    X = torch.rand(20, 2)
    assert torch.linalg.eigvalsh(Cosine(2, period=0.4)(X).detach()).min() > -1e-10


def test_the_quasi_periodic_process_in_linear_time_equals_the_dense_one(float64):
    cycles = Cosine(1, period=0.3) + Cosine(1, period=0.15, variance=0.5)
    kernel = Matern(1, 0.5, lengthscale=2.0) * cycles
    t = torch.rand(30)
    steps, *order = state_space.sort_inputs(t)
    mean, precision = torch.randn(30), torch.rand(30) + 0.5
    precision[::3] = 0.0
    with torch.no_grad():
        series = state_space.Series(kernel.state_space_model(steps, kernel.params()), *order)
        fast = state_space.condition(series, mean, precision)
        dense = gaussian_sites.condition(kernel(t[:, None]), torch.zeros(30), mean, precision)
    torch.testing.assert_close(fast.mean, dense.mean)
    torch.testing.assert_close(fast.variance, dense.variance)


def test_only_one_whole_column_and_the_class_itself_are_markov():
    class Other(Cosine):
        pass

    assert Cosine(1).is_markov
    assert not Cosine(2).is_markov
    assert not Cosine(1, active_dims=[0]).is_markov
    assert not Other(1).is_markov
