"""Data, models and posteriors of structured bounds and guides."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet

N, D, Q, B = 5, 3, 2, 4


def make_data(*series):
    """Inputs and data with holes, among them the whole row 1."""
    x = torch.linspace(0.0, 1.0, N)[:, None] + 0.05 * torch.rand(*series, N, 1)
    y = torch.randn(*series, N, D)
    y[torch.rand(y.shape) < 0.2] = torch.nan
    y[..., 1, :] = torch.nan
    return x, y


def make_model(**options):
    kernel = Matern(1, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(Q,))
    return GPVAE(kernel, MLP(Q + options.get("independent_dim", 0), D, [3], nn.Tanh), Gaussian(0.4), **options)


def make(*series, **options):
    model = make_model(**options)
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2])})
    data = make_data(*series)
    guide(*data)
    return model, guide, *data


def posterior_of(guide, *args, site="f"):
    """q of a site."""
    fn = poutine.trace(guide).get_trace(*args).nodes[site]["fn"]
    return fn.base_dist if isinstance(fn, torch.distributions.Independent) else fn


def matern(t):
    return 0.8 * (-(t - t.mT).abs() / 0.4).exp()


def two_processes(t, y):
    """A mean and a log variance: one of our processes and a normal."""
    f = pyro.sample("f", GaussianProcess(RBF(1, lengthscale=0.3), t))
    g = pyro.sample("log.variance", dist.MultivariateNormal(torch.full((N,), -1.0), matern(t)))
    pyro.sample("y", dist.Normal(f, (0.5 * g).exp()).mask(~torch.isnan(y[:, 0])).to_event(1), obs=y[:, 0].nan_to_num())


class Pooled(nn.Module):
    """What all trials together say."""

    def forward(self, y):
        counts = (~torch.isnan(y)).sum(0)
        return y.nansum(0) / counts.clamp_min(1), 0.5 / counts.clamp_min(1).sqrt()
