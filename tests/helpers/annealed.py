"""A small model for annealed guides."""

import torch

from pyro_lvgp.models import BayesianGPLVM


def small(dtype=torch.float64):
    torch.manual_seed(0)
    Y = torch.randn(8, 3, dtype=dtype)
    Y[2, 1] = torch.nan
    return BayesianGPLVM(8, 3, 2, num_inducing=4).to(dtype).initialize(Y), Y
