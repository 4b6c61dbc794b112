"""Errors of kernels."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_lvgp.kernels import RBF, Combination, Kernel, Linear, Matern, Periodic
from tests.helpers.abstract import missing_methods


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: RBF(0), "input_dim of 1 or more, got 0"),
        (lambda: RBF(2, lengthscale=0.0), "lengthscale > 0, got 0"),
        (lambda: RBF(2, lengthscale=torch.tensor([1.0, -1.0])), "lengthscale > 0"),
        (lambda: RBF(2, variance=float("nan")), "variance > 0, got nan"),
        (lambda: Periodic(1, -1.0), "period > 0"),
        (lambda: RBF(2, lengthscale=torch.ones(3)), r"lengthscale that expands to \[2\] .* got shape \[3\]"),
        (lambda: RBF(2, lengthscale=torch.ones(3), batch_shape=(3,)), r"expands to \[3, 2\]"),
        (lambda: Matern(1, 1.0), "nu of 0.5, 1.5 or 2.5, got 1.0"),
        (lambda: RBF(3, active_dims=[0, 1]), "input_dim=3 .* try input_dim=2"),
        (lambda: RBF(1, active_dims=[-1]), "none negative"),
        (lambda: RBF(1, active_dims=[3])(torch.ones(2, 2)), "at least 4 columns, got 2"),
        (lambda: RBF(3)(torch.ones(5, 2)), r"expected X with 3 columns, got 2; .* RBF\(2\)"),
        (lambda: RBF(1)(torch.ones(1, 5)), r"expected X with 1 columns, got 5; give a single column as X\[:, None\], make"),
        (lambda: RBF(3)(torch.ones(5, 3), torch.ones(5, 2)), "expected Z with 3 columns, got 2"),
        (lambda: RBF(3).diagonal(torch.ones(5, 2)), "expected X with 3 columns, got 2"),
        (lambda: RBF(3)._select(torch.ones(5), "X"), r"shape \[\*batch, N, Q\], got \[5\]"),
    ],
)
def test_value_errors(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


@pytest.mark.parametrize("make", [RBF, Matern, Periodic, Linear])
def test_numbers_of_columns_are_whole(make, unchecked):
    with pytest.raises(TypeError, match=r"expected input_dim to be an integer, got 2\.0; use int"):
        make(2.0)


def test_arrays_are_refused(unchecked):
    X = torch.ones(3, 1)
    for call in (RBF(1), RBF(1).diagonal, RBF(1) + Linear(1)):
        with pytest.raises(TypeError, match=r"expected X to be a torch.Tensor, got ndarray; use torch.as_tensor"):
            call(X.numpy())
    with pytest.raises(TypeError, match=r"expected Z to be a torch.Tensor, got ndarray"):
        RBF(1)(X, X.numpy())


def test_integers_are_refused():
    for call in (RBF(1), RBF(1).diagonal, RBF(1) + Linear(1)):
        with pytest.raises(TypeError, match=r"X of floating point, got torch\.int64"):
            call(torch.ones(3, 1, dtype=torch.int64))


def test_prior_of_the_wrong_shape_says_so():
    kernel = RBF(2)
    kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0))
    with pytest.raises(ValueError, match=r"got shape \[\]; .*expand\(\[2\]\).to_event\(1\)"):
        kernel(torch.randn(3, 2))


def test_a_kernel_must_implement_its_two_methods():
    White = type("White", (Kernel,), {"k": lambda self, X, Z, params: X @ Z.mT})
    for cls, missing in (
        (Kernel, "k, k_diagonal"),
        (White, "k_diagonal"),
        (Combination, "k, k_diagonal"),
    ):
        with pytest.raises(TypeError, match=f"abstract class {cls.__name__} .*{missing_methods(missing)}"):
            cls(1)


def test_a_diagonal_without_the_batch_of_its_kernel_is_refused():
    class White(Kernel):
        def k(self, X, Z, params):
            return (X[..., :, None, :] == Z[..., None, :, :]).all(-1).to(X.dtype).expand(2, -1, -1)

        def k_diagonal(self, X, params):
            return torch.ones_like(X[..., 0])

    with pytest.raises(ValueError, match=r"k_diagonal of White to have the batch shape \[2\]"):
        White(1, batch_shape=(2,)).diagonal(torch.randn(3, 1))
