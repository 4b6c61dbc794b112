"""Batched covariance functions with parameters."""

from pyro_lvgp.kernels.adapter import as_kernel
from pyro_lvgp.kernels.base import Kernel, Product, Stack, Sum
from pyro_lvgp.kernels.parametric import RBF, Linear, Matern, Periodic

__all__ = ["RBF", "Kernel", "Linear", "Matern", "Periodic", "Product", "Stack", "Sum", "as_kernel"]
