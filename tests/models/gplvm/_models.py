"""A small GPLVM and data with holes."""

import torch

from pyro_lvgp.models import BayesianGPLVM

N, D, Q, M = 12, 3, 2, 5


def make_model(**kwargs):
    return BayesianGPLVM(N, D, kwargs.pop("latent_dim", Q), num_inducing=M, **kwargs)


def with_holes(Y):
    Y = Y.clone()
    Y[torch.rand(Y.shape) < 0.5] = torch.nan
    Y[:, 0] = torch.where(torch.isnan(Y).all(1), torch.ones(len(Y)), Y[:, 0])
    return Y
