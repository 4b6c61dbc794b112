"""Derivatives of covariance functions."""

import importlib.util
import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from pyro_lvgp.ops import covariance
from tests.helpers.points import rand


def _differentiable():
    v, ell, p = torch.tensor(1.3).double(), torch.tensor([0.7, 1.9]).double(), torch.tensor([2.0, 3.0]).double()
    return {
        "rbf": (covariance.rbf, (ell, v)),
        "matern32": (lambda *a: covariance.matern(*a, 1.5), (ell, v)),
        "matern52": (lambda *a: covariance.matern(*a, 2.5), (ell, v)),
        "periodic": (covariance.periodic, (p, ell, v)),
        "linear": (covariance.linear, (ell,)),
    }


@pytest.mark.parametrize("name", _differentiable())
@pytest.mark.parametrize("where", ["apart", "repeated", "single"])
def test_first_and_second_derivatives(name, where):
    function, parameters = _differentiable()[name]
    X, Z = rand(4, 2), rand(3, 2)
    if where == "repeated":
        Z[0], Z[1] = X[0], X[0]
    if where == "single":
        X, Z = X[:1], X[:1].clone()
    inputs = [t.requires_grad_() for t in (X, Z, *parameters)]
    assert gradcheck(function, inputs)
    # Differences of a Matérn 3⁄2 gradient are off by the step (1e-6), because its third derivative jumps at r = 0.
    assert gradgradcheck(function, inputs, atol=1e-4)


@pytest.mark.parametrize("function", [covariance.rbf, lambda *a: covariance.matern(*a, 1.5)], ids=["rbf", "matern32"])
def test_hessian_at_coincident_points_is_minus_the_metric(function, dtype):
    # It is −σ²/ℓ² for the RBF and −3σ²/ℓ² for Matérn 3⁄2.  Rounding makes r² negative for some of the 40 points, where
    # a clamp that stops derivatives would make the Hessian 0.
    ell = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    X = rand(40, 3, dtype=dtype).requires_grad_()
    variances = function(X, X.detach().clone(), ell, torch.ones((), dtype=dtype)).diagonal()
    (gradient,) = torch.autograd.grad(variances.sum(), X, create_graph=True)
    columns = [torch.autograd.grad(g.sum(), X, retain_graph=True)[0] for g in gradient.unbind(-1)]
    expected = -torch.diag(ell**-2) * (1.0 if function is covariance.rbf else 3.0)
    torch.testing.assert_close(torch.stack(columns, -1), expected.expand(40, 3, 3), rtol=1e-4, atol=1e-4)


def test_matern_half_has_finite_derivatives_at_repeated_points():
    X = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    ell = torch.ones(2, dtype=torch.float64, requires_grad=True)
    K = covariance.matern(X, X, ell, torch.ones((), dtype=torch.float64), 0.5)
    grads = torch.autograd.grad(K.sum(), (X, ell), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in grads), (X, ell), allow_unused=True, materialize_grads=True)
    assert all(g.isfinite().all() for g in (*grads, *second))
    X, Z = rand(4, 2), rand(3, 2)
    assert gradcheck(
        lambda *a: covariance.matern(*a, 0.5), [t.requires_grad_() for t in (X, Z, ell)] + [torch.ones(()).double()]
    )


def test_squared_distance_is_that_of_differences(dtype):
    X, Z = rand(4, 1, 6, 3, dtype=dtype).requires_grad_(), rand(5, 7, 3, dtype=dtype).requires_grad_()
    fast, slow = covariance.squared_distance(X, Z), covariance.exact_squared_distance(X, Z)
    tol = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(fast, slow, rtol=tol, atol=tol)
    weights = rand(*slow.shape, dtype=dtype)
    for a, b in zip(*(torch.autograd.grad((d * weights).sum(), (X, Z)) for d in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=30 * tol)
    assert (covariance.squared_distance(X, X) >= 0).all()


@pytest.mark.parametrize("name", _differentiable())
def test_vmap_and_func_grad(name):
    function, parameters = _differentiable()[name]
    X, Z = rand(5, 4, 2), rand(3, 2)

    def total(x):
        return function(x, Z, *parameters).sum()

    torch.testing.assert_close(torch.func.vmap(lambda x: function(x, Z, *parameters))(X), function(X, Z, *parameters))
    grads = torch.func.vmap(torch.func.grad(total))(X)
    X.requires_grad_()
    torch.testing.assert_close(grads, torch.autograd.grad(total(X), X)[0])


@pytest.mark.parametrize("name", _differentiable())
def test_compiles_to_one_graph(name, monkeypatch):
    # The import hook of the tests wraps every function; compile the file as users get it, without those checks.
    spec = importlib.util.spec_from_file_location("plain_covariance", covariance.__file__)
    plain = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plain_covariance", plain)
    spec.loader.exec_module(plain)
    nu = {"matern32": (1.5,), "matern52": (2.5,)}.get(name, ())
    function = getattr(plain, name.rstrip("0123456789"))
    _, parameters = _differentiable()[name]
    X, Z = rand(4, 2), rand(3, 2)

    def score(X):
        return torch.func.grad(lambda x: function(x, Z, *parameters, *nu).sum())(X)

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), score(X))
