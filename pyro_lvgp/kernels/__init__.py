"""Batched covariance functions with parameters."""

from pyro_lvgp.kernels.adapter import as_kernel
from pyro_lvgp.kernels.base import Kernel, Product, Sum
from pyro_lvgp.kernels.parametric import RBF, Linear, Matern, Periodic
from pyro_lvgp.kernels.stack import Stack

__all__ = ["RBF", "Kernel", "Linear", "Matern", "Periodic", "Product", "Stack", "Sum", "as_kernel"]
