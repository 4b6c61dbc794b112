"""A small model of two views, and tables simulated from a known structure."""

import torch

from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, LowRankGaussian
from pyro_lvgp.models import MultiViewGPLVM

N, Q = 14, 2
DIMS = {"sensors": 3, "label": 2}
INDUCING = {"sensors": 5, "label": 4}


def small_model(**kwargs):
    kernel = {"sensors": RBF(Q, lengthscale=1.3), "label": RBF(Q, variance=0.7)}
    options = {"likelihood": {"label": Bernoulli()}, "num_inducing": INDUCING} | kwargs
    return MultiViewGPLVM(N, DIMS, Q, kernel, **options)


def gaussian_model(**kwargs):
    likelihood = {"sensors": Gaussian(0.3), "label": Gaussian(torch.tensor([0.2, 0.5]), data_dim=2)}
    return small_model(likelihood=likelihood, **kwargs)


def low_rank_model(**kwargs):
    """Model whose sensors have correlated residuals."""
    return small_model(likelihood={"sensors": LowRankGaussian(1, 3), "label": Bernoulli()}, **kwargs)


def small_table(*, binary=True):
    """Rows with missing entries, and with missing views."""
    Y = torch.randn(N, 5)
    if binary:
        Y[:, 3:] = (Y[:, 3:] > 0.0).to(Y)
    Y[0, 1] = Y[1, 4] = torch.nan
    Y[2, :3] = torch.nan
    Y[3, 3:] = torch.nan
    return Y


def smooth(x, num_columns, lengthscale=1.5):
    """Random functions of unit variance from a process with a squared exponential kernel, by random features."""
    omega = torch.randn(200, x.shape[-1]) / lengthscale
    phase = 2.0 * torch.pi * torch.rand(200)
    return (x @ omega.mT + phase).cos() @ torch.randn(200, num_columns) * (2.0 / 200) ** 0.5


def shared_and_private(num_rows, num_columns=8, noise=0.2):
    """Latents, and two views of which each depends on the first latent and one of its own."""
    Z = torch.randn(num_rows, 3)
    views = {name: smooth(Z[:, [0, q]], num_columns) for name, q in (("a", 1), ("b", 2))}
    return Z, {name: f + noise * torch.randn_like(f) for name, f in views.items()}
