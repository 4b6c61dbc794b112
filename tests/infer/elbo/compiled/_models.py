"""Models whose bounds are compiled, and comparisons with eager bounds."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.models import BayesianGPLVM

N, D, Q = 12, 3, 2


def counts(missing=True):
    Y = torch.poisson(torch.rand(N, D) + 0.5).clamp_max(1.0)
    if missing:
        Y[2, 1] = torch.nan
        Y[4] = torch.nan
    return Y


def gplvm(guide, likelihood=None, kernel=None):
    model = BayesianGPLVM(N, D, Q, num_inducing=5, likelihood=likelihood, kernel=kernel)
    idx = torch.tensor([2, 4, 5, 9])
    return model, guide(model), (counts()[idx], idx)


def loss_and_gradients(bound, model, guide, args):
    """With the same random numbers each time, and the gradients by the names of the parameters."""
    torch.manual_seed(3)
    loss = bound.loss_and_grads(model, guide, *args)
    gradients = {}
    for name, param in pyro.get_param_store().named_parameters():
        gradients[name], param.grad = param.grad, None
    return loss, gradients


def assert_same(first, second):
    assert first[0] == pytest.approx(second[0], rel=1e-9)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        other = second[1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(other, gradient, rtol=1e-7, atol=1e-9, msg=name)


def linear(y, scale=1.0):
    """No randomness but that of the data: a loss without noise."""
    loc = pyro.param("loc", lambda: torch.zeros(D))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(loc, scale).to_event(1), obs=y)


def no_latents(y, scale=1.0):
    """A guide."""
