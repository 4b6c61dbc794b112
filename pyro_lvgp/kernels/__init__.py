"""Covariance functions that broadcast over batches, and random Fourier features."""

from pyro_lvgp.kernels.base import Kernel, KernelParams
from pyro_lvgp.kernels.composition import Combination, Product, Stack, Sum
from pyro_lvgp.kernels.gpytorch import as_kernel
from pyro_lvgp.kernels.linear import Linear
from pyro_lvgp.kernels.periodic import Cosine, Periodic
from pyro_lvgp.kernels.spectral import mixture_kernel, random_features, spectral_density
from pyro_lvgp.kernels.stationary import RBF, Matern

__all__ = [
    "RBF",
    "Combination",
    "Cosine",
    "Kernel",
    "KernelParams",
    "Linear",
    "Matern",
    "Periodic",
    "Product",
    "Stack",
    "Sum",
    "as_kernel",
    "mixture_kernel",
    "random_features",
    "spectral_density",
]
