"""Values of every kernel: batches, columns, precision, state-space forms."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.kernels import RBF, Linear, Matern, Periodic
from tests.helpers.points import rand


def test_diag_symmetry_and_positive_definiteness(make, dtype):
    kernel = make(2, lengthscale=torch.rand(3, 2, dtype=dtype) + 0.5, batch_shape=(3,))
    X = rand(5, 1, 20, 2, dtype=dtype)
    X[..., 1, :] = X[..., 0, :]  # repeated inputs
    K = kernel(X).detach()
    tol = 100 * torch.finfo(dtype).eps
    assert K.dtype == dtype
    assert K.shape == (5, 3, 20, 20)
    torch.testing.assert_close(kernel.diagonal(X), K.diagonal(dim1=-2, dim2=-1), rtol=tol, atol=tol)
    torch.testing.assert_close(kernel(X, X), K, rtol=0, atol=0)
    torch.testing.assert_close(K, K.mT, rtol=tol, atol=tol)
    assert torch.linalg.eigvalsh(K.double()).min() > -20 * tol


def test_diag_has_the_batch_shape_of_the_matrix(make):
    kernel = make(2, batch_shape=(3,))
    assert kernel.batch_shape == (3,)
    X = torch.randn(4, 2)
    assert kernel.diagonal(X).shape == (3, 4)
    kernel = make(2)
    for part in kernel.modules():  # a lengthscale with a batch shape of its own
        if hasattr(part, "lengthscale"):
            part.lengthscale = PyroSample(lambda _: torch.ones(5, 1, 2))
    assert kernel.diagonal(X).shape == kernel(X).shape[:-1]


def test_batch_of_kernels_equals_one_by_one(make):
    ell, v = torch.rand(3, 2).double() + 0.5, torch.rand(3).double() + 0.5
    X, Z = rand(3, 6, 2), rand(4, 2)
    batched = make(2, lengthscale=ell, batch_shape=(3,))(X, Z)
    for b in range(3):
        torch.testing.assert_close(batched[b], make(2, lengthscale=ell[b])(X[b], Z))
    batched = RBF(2, variance=v, batch_shape=(3,))(X, Z)
    torch.testing.assert_close(batched[1], RBF(2, variance=v[1])(X[1], Z))


def test_active_dims():
    X, Z = torch.randn(5, 4), torch.randn(3, 4)
    kernel = RBF(2, lengthscale=torch.tensor([0.5, 2.0]), active_dims=[3, 1])
    torch.testing.assert_close(kernel(X, Z), RBF(2, lengthscale=kernel.lengthscale.detach())(X[:, [3, 1]], Z[:, [3, 1]]))
    assert kernel.diagonal(X).shape == (5,)
    assert (kernel * Periodic(1, active_dims=[0]))(X, Z).shape == (5, 3)
    assert not any("columns" in name for name in kernel.state_dict())


@pytest.mark.parametrize("changed", ["k", "covariance", "k_diagonal", "diagonal", "_select", "params"])
def test_a_subclass_with_another_covariance_has_no_chain_but_its_own(changed):
    Same = type("Same", (Matern,), {"parameters_text": lambda self: ""})
    Other = type("Other", (Same,), {changed: getattr(Matern, changed)})
    Derived = type("Derived", (Other,), {})
    Chained = type("Chained", (Derived,), {"state_space_model": Matern.state_space_model})
    Said = type("Said", (Other,), {"is_markov": True})
    found = {cls.__name__: cls(1).is_markov for cls in (Same, Other, Derived, Chained, Said)}
    assert found == {"Same": True, "Other": False, "Derived": False, "Chained": True, "Said": True}
    assert not (Matern(1) + Other(1)).is_markov


def test_a_covariance_that_a_mixin_overrides_has_no_chain_of_matern():
    class Squared:
        def k(self, X, Z, params):
            return super().k(X, Z, params).square()

    assert not type("Mixed", (Squared, Matern), {})(1).is_markov


def test_warped_time_is_modelled_beyond_the_points_that_are_taken_by_chains():
    class Warped(Matern):
        def k(self, X, Z, params):
            return super().k(X.log(), Z.log(), params)

    X = torch.linspace(1.0, 50.0, 300, dtype=torch.float64)[:, None]
    f, kernel = X.squeeze(-1).sin(), Warped(1, 0.5).double()
    expected = GaussianProcess(Matern(1, 0.5).double(), X.log()).log_prob(f)
    torch.testing.assert_close(GaussianProcess(kernel, X).log_prob(f), expected, rtol=1e-3, atol=0.0)


def test_dtype_follows_the_tensors_given_and_to(dtype):
    assert RBF(2, lengthscale=torch.ones(2, dtype=dtype)).variance.dtype == dtype
    assert RBF(2, lengthscale=torch.tensor([1, 2])).variance.dtype == torch.float32
    torch.set_default_dtype(dtype)
    assert Linear(2).variance.dtype == dtype
    kernel = (RBF(2) + Matern(2)).double()
    assert kernel(rand(4, 2)).dtype == torch.float64
    torch.testing.assert_close(RBF(1, variance=1e-3, lengthscale=1e3).lengthscale, torch.full((1,), 1e3))


def test_float32_dates_keep_their_digits():
    """Whole days since the year 0, which float32 holds exactly; quotients of them it does not."""
    X = (738_000.0 + torch.arange(6.0))[:, None]
    for kernel in (RBF(1, lengthscale=3.0), Matern(1, 1.5, lengthscale=3.0), Periodic(1, 7.0)):
        found = kernel(X)
        torch.testing.assert_close(found.double(), kernel.double()(X.double()), rtol=0.0, atol=2e-6)


def test_float32_time_series_far_from_the_origin():
    t = 0.37 * torch.arange(1000.0).unsqueeze(-1) + 5000.0
    torch.testing.assert_close(RBF(1)(t), RBF(1).double()(t.double()).float(), rtol=0, atol=1e-6)
    X = torch.randn(50, 3) + 1000.0
    torch.testing.assert_close(RBF(3)(X), RBF(3).double()(X.double()).float(), rtol=0, atol=1e-5)


def test_parameters_text():
    kernel = RBF(2, lengthscale=torch.tensor([0.5, 1.2]))
    assert kernel.parameters_text() == "lengthscale=[0.5, 1.2], variance=1"
    shown = (2 * Linear(9) + Linear(1)).parameters_text()
    assert shown == "Product(Constant(2), Linear(variance=[1, 1, 1, 1, 1, 1, 1, 1, ...])), Linear(variance=[1])"
    kernel.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    owner = PyroModule("model")
    owner.kernel = kernel
    with poutine.trace() as tape, owner._pyro_context:
        assert kernel.parameters_text() == "lengthscale=[0.5, 1.2], variance ~ LogNormal"
        assert not tape.trace.nodes
        drawn = kernel.variance
        assert kernel.parameters_text().endswith(f"variance={drawn:.4g}")
