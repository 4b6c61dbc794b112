"""Priors, particles and training of kernels in Pyro."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroSample

from pyro_lvgp.kernels import RBF, Linear, Matern, Stack
from tests.kernels._kernels import KERNELS, GPModel


def _with_priors():
    kernel = Matern(2) + Linear(2)
    ours, linear = kernel.kernels
    ours.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    ours.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    linear.variance = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    return kernel


def test_vectorised_particles_equal_a_loop():
    S, N = 4, 6
    X, y = torch.randn(N, 2), torch.randn(N)

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.kernel = _with_priors()

        def forward(self, X):
            K = self.kernel(X.expand(*self.kernel.diagonal(X).shape[:-1], N, 2)) + 0.1 * torch.eye(N)
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(N), K), obs=y)
            return K

    model = Model()
    with pyro.plate("particles", S, dim=-2):
        trace = poutine.trace(model).get_trace(X)
    assert trace.nodes["kernel.kernels.0.lengthscale"]["value"].shape == (S, 1, 2)
    assert trace.nodes["kernel.kernels.0.variance"]["value"].shape == (S, 1)
    K = trace.nodes["_RETURN"]["value"]
    assert K.shape == (S, 1, N, N)
    sites = [f"kernel.kernels.{s}" for s in ("0.lengthscale", "0.variance", "1.variance")]
    for s in range(S):
        one = {name: trace.nodes[name]["value"][s, 0] for name in sites}
        torch.testing.assert_close(poutine.condition(model, one)(X), K[s, 0])


def test_prior_is_sampled_once_per_call_of_the_model():
    model = GPModel(_with_priors(), torch.randn(5, 2), torch.randn(5))
    trace = poutine.trace(model).get_trace()
    assert {"kernel.kernels.0.lengthscale", "kernel.kernels.1.variance"} <= set(trace.nodes)


@pytest.mark.parametrize("particles", [1, 3])
def test_svi_with_priors(particles):
    model = GPModel(_with_priors(), torch.randn(5, 2), torch.randn(5))
    guide = pyro.infer.autoguide.AutoNormal(model)
    elbo = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    assert all(torch.isfinite(torch.tensor(svi.step())) for _ in range(3))


def test_each_parameter_is_read_once_per_call():
    model = PyroModule("model")
    model.kernel = RBF(2)
    reads = []

    class Count(poutine.messenger.Messenger):
        def _pyro_param(self, msg):
            reads.append(msg["name"])

    with Count():
        model.kernel(torch.randn(3, 2), torch.randn(4, 2))
    assert sorted(reads) == ["model.kernel.lengthscale", "model.kernel.variance"]


def test_kernels_on_their_own_do_not_share_parameters():
    X = torch.randn(3, 1)
    for make in KERNELS.values():
        a, b = make(1, lengthscale=0.1), make(1, lengthscale=2.0)
        a(X), a.diagonal(X)
        fresh = make(1, lengthscale=2.0)(X)
        torch.testing.assert_close(b(X), fresh)
        a + b  # still free to be given to an owner
    assert not list(pyro.get_param_store().keys())


def test_svi_trains_a_kernel_in_a_plain_function():
    kernel, X = RBF(1), torch.linspace(0, 1, 8).unsqueeze(-1)

    def model():
        K = kernel(X) + 0.1 * torch.eye(8)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(8), K), obs=torch.zeros(8))

    SVI(model, lambda: None, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()).step()
    assert kernel.variance < 1
    torch.testing.assert_close(kernel(X).diagonal(), kernel.variance.expand(8))


def test_sums_serve_one_model_and_hand_over_to_new_ones():
    def make():
        return RBF(2) + 2.0 * Linear(2)

    X = torch.randn(4, 2)
    kernel = make()
    kernel(X)
    kernel.diagonal(X)
    GPModel(kernel, X, torch.zeros(4))  # which never runs
    first = GPModel(kernel, X, torch.zeros(4))
    first.kernel.kernels[0].lengthscale = torch.tensor([0.3, 0.7])
    poutine.trace(first).get_trace()
    for taker in (lambda: GPModel(kernel, X, torch.zeros(4)), lambda: kernel * RBF(2), lambda: Stack(kernel)):
        with pytest.raises(ValueError, match=r"kernel of its own for each model, got a Sum .*load_state_dict"):
            taker()
    new = make()
    new.load_state_dict(kernel.state_dict())
    pyro.clear_param_store()
    second = GPModel(new, X, torch.zeros(4))
    poutine.trace(second).get_trace()
    torch.testing.assert_close(second.kernel(X), first.kernel(X), rtol=0, atol=0)


def test_single_kernels_serve_several_models():
    kernel, X = RBF(2), torch.randn(4, 2)
    for make in (lambda: kernel, lambda: kernel, lambda: kernel + Linear(2), lambda: 2.0 * kernel):
        poutine.trace(GPModel(make(), X, torch.zeros(4))).get_trace()
