"""A regression whose bound is known in closed form."""

import functools

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from torch.distributions import Normal, constraints, kl_divergence

N, Q = 30, 3


def adam(lr=0.1):
    return functools.partial(torch.optim.Adam, lr=lr)


class Model(PyroModule):
    """A regression on features X, whose noise is a parameter."""

    def __init__(self):
        super().__init__()
        self.noise = PyroParam(torch.tensor(0.5), constraints.positive)

    def forward(self, X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(Q), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ w, self.noise), obs=y)


class Guide(PyroModule):
    """Independent Gaussians; the mean has a module of its own."""

    def __init__(self):
        super().__init__()
        self.w = PyroModule()
        self.w.mean = PyroParam(torch.zeros(Q))
        self.precision = PyroParam(torch.ones(Q), constraints.positive)

    def forward(self, X, y):
        pyro.sample("w", dist.Normal(self.w.mean, self.precision.rsqrt()).to_event(1))


def model(X, y):
    noise = pyro.param("noise", torch.tensor(0.5), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(Q), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, noise), obs=y)


def guide(X, y):
    mean = pyro.param("w.mean", torch.zeros(Q))
    precision = pyro.param("precision", torch.ones(Q), constraint=constraints.positive)
    pyro.sample("w", dist.Normal(mean, precision.rsqrt()).to_event(1))


def exact_loss(model, guide, X, y):
    """Minus the bound of the regression, in closed form."""
    mean, precision, noise = guide.w.mean, guide.precision, model.noise
    squares = (y - X @ mean).square().sum() + (X.square() @ precision.reciprocal()).sum()
    expected = -0.5 * (len(y) * (2.0 * torch.pi * noise.square()).log() + squares / noise.square())
    return kl_divergence(Normal(mean, precision.rsqrt()), Normal(torch.zeros(Q), 1.0)).sum() - expected


def data():
    X = torch.randn(N, Q) @ (torch.eye(Q) + 0.3)
    return X, X @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * torch.randn(N)


def precision_update(X, y, noise=0.5):
    return {"guide.precision": 1.0 + X.square().sum(0) / noise**2}


def parts(kind):
    return (Model(), Guide()) if kind == "modules" else (model, guide)


def run_on(svi, *args, steps=20):
    pyro.set_rng_seed(1)
    return [svi.step(*args) for _ in range(steps)]
