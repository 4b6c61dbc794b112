"""Models of all shapes, and their joint densities."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam


def conjugate(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def exact(y):
    pyro.sample("mu", dist.Normal(y.sum() / (1 + len(y)), (1.0 + len(y)) ** -0.5))


def local_and_global(y):
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(3), 0.1).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.deterministic("double", 2 * z, event_dim=1)
        pyro.deterministic("default", z[..., 0] + 1.0)
        pyro.sample("y", dist.Normal(z, scale).to_event(1), obs=y)


class Masked(PyroModule):
    """Factor analysis that takes NaN for missing, with its mask in one of three places."""

    event_dims = {"z": ("latent",), "y": ("output",)}  # noqa: RUF012

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.weight = PyroParam(torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, 1.0]]))

    def forward(self, y):
        mask, y = ~torch.isnan(y), torch.nan_to_num(y)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            fn = dist.Normal(z @ self.weight, 0.5)
            if self.place == "entries":
                pyro.sample("y", fn.mask(mask).to_event(1), obs=y)
            elif self.place == "rows":
                pyro.sample("y", fn.to_event(1).mask(mask.all(-1)), obs=y)
            else:
                with poutine.mask(mask=mask.all(-1)):
                    pyro.sample("y", fn.to_event(1), obs=y)
