"""Derivatives of a smoother beside those of the forward scan."""

import pytest
import torch

from pyro_lvgp.kernels import Cosine, Matern
from pyro_lvgp.ops.state_space import _log_normaliser
from pyro_lvgp.ops.state_space._log_normaliser import log_normaliser_of_coupled, log_normaliser_of_scalar

N, R = 5, 3
SYMMETRIC = {"P", "Q", "J"}


@pytest.fixture(params=[((), 0.5), ((2,), 2.5)], ids=["one series, five states", "batch, seven states"])
def model(request, float64):
    """Matrices of a sum of a process and a quasi-periodic one, at inputs of which two coincide."""
    batch, nu = request.param
    periodic = Matern(1, 1.5, lengthscale=0.4, batch_shape=batch) * Cosine(1, period=0.7, batch_shape=batch)
    kernel = periodic + Matern(1, nu, lengthscale=0.3, batch_shape=batch)
    t = torch.tensor([0.0, 0.1, 0.1, 0.5, 0.9])
    P, A, Q, h = (part.detach().requires_grad_() for part in kernel.state_space_model(t.diff(), kernel.params()))
    return {"P": P, "A": A, "Q": Q}, h, batch


@pytest.fixture(params=["scalar", "coupled"])
def case(request, model):
    """Function with hand-written derivatives, its terms as plain operations, and inputs by name."""
    matrices, h, batch = model
    if request.param == "scalar":
        W = torch.rand(*batch, N)
        W[..., 2], W[..., 3] = 0.0, 30.0
        sites = {"h": h, "W": W.requires_grad_(), "c": torch.randn(*batch, N, 1, R, requires_grad=True)}
        return log_normaliser_of_scalar, _log_normaliser._condition_on_scalar, matrices | sites
    B = torch.randn(*batch, N, h.shape[-1], 2)
    sites = {"J": (B @ B.mT).requires_grad_(), "j": torch.randn(*batch, N, h.shape[-1], R, requires_grad=True)}
    return log_normaliser_of_coupled, _log_normaliser._condition_on_coupled, matrices | sites


def test_derivatives_are_those_of_the_forward_scan(case):
    by_hand, plain, inputs = case
    value, expected = by_hand(*inputs.values()), plain(*inputs.values()).value
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0.0)
    weight = torch.randn_like(value)
    gradients = (torch.autograd.grad(x, list(inputs.values()), weight) for x in (value, expected))
    for name, found, autograd in zip(inputs, *gradients, strict=True):
        if name in SYMMETRIC:  # only their symmetric part matters
            found, autograd = found + found.mT, autograd + autograd.mT
        assert autograd.abs().max() > 1e-3
        torch.testing.assert_close(found, autograd, rtol=1e-10, atol=1e-12)


def test_second_derivatives(case):
    by_hand, plain, inputs = case
    *constants, column = inputs.values()
    constants = [part.detach() for part in constants]
    results = []
    for value in (by_hand(*constants, column), plain(*constants, column).value):
        (slope,) = torch.autograd.grad(value.sum(), column, create_graph=True)
        results.append(torch.autograd.grad(slope.pow(3).sum(), column)[0])
    assert results[1].abs().max() > 1e-3
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
