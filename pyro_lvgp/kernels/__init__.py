"""Covariance functions that broadcast over batches, and random Fourier features."""

from pyro_lvgp.kernels.base import Kernel, KernelParams
from pyro_lvgp.kernels.categorical import Categorical, Index
from pyro_lvgp.kernels.composition import Combination, Product, Stack, Sum
from pyro_lvgp.kernels.embedded import Embedded
from pyro_lvgp.kernels.gpytorch import as_kernel
from pyro_lvgp.kernels.linear import Linear
from pyro_lvgp.kernels.periodic import Cosine, Periodic
from pyro_lvgp.kernels.spectral import mixture_kernel, random_features, spectral_density
from pyro_lvgp.kernels.spectral_mixture import SpectralMixture
from pyro_lvgp.kernels.stationary import RBF, Matern, RationalQuadratic

__all__ = [
    "RBF",
    "Categorical",
    "Combination",
    "Cosine",
    "Embedded",
    "Index",
    "Kernel",
    "KernelParams",
    "Linear",
    "Matern",
    "Periodic",
    "Product",
    "RationalQuadratic",
    "SpectralMixture",
    "Stack",
    "Sum",
    "as_kernel",
    "mixture_kernel",
    "random_features",
    "spectral_density",
]
