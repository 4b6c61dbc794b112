"""Sums of a squared exponential kernel of some columns of the inputs and kernels of other columns."""

from typing import NamedTuple

from pyro_lvgp.kernels.base import Kernel, KernelParams
from pyro_lvgp.kernels.composition import Product, Sum, _Constant
from pyro_lvgp.kernels.stationary import RBF

__all__ = ["AdditiveRBF", "as_additive_rbf"]


class AdditiveRBF(NamedTuple):
    """Terms of a sum of kernels.

    :param params: parameters of the squared exponential kernel.
    :param others: kernels that do not depend on its columns, with their parameters.
    """

    params: KernelParams
    others: list[tuple[Kernel, KernelParams]]


def as_additive_rbf(kernel: Kernel, params: KernelParams, num_columns: int) -> AdditiveRBF | None:
    """Split a sum into the squared exponential kernel of the first columns and the kernels of other columns.

    Kernels of other classes, also subclasses, may depend on any column.

    :param kernel: the kernel.
    :param params: the tuple that :meth:`Kernel.params` returns.
    :param num_columns: number of the first columns.
    :returns: the terms; None for a kernel that is no such sum.
    """
    terms = list(zip(kernel.kernels, params, strict=True)) if type(kernel) is Sum else [(kernel, params)]
    own = [(part, values) for part, values in terms if _depends_on(part, num_columns)]
    if len(own) != 1 or not _is_rbf_of(own[0][0], num_columns):
        return None
    return AdditiveRBF(own[0][1], [(part, values) for part, values in terms if part is not own[0][0]])


def _is_rbf_of(kernel: Kernel, num_columns: int) -> bool:
    """Whether a kernel is the squared exponential one of all the first columns, in their order."""
    columns = tuple(range(num_columns))
    if type(kernel) is not RBF:
        return False
    return kernel.active_dims == columns or (kernel.active_dims is None and kernel.input_dim == num_columns)


def _depends_on(kernel: Kernel, num_columns: int) -> bool:
    """Whether a kernel may depend on one of the first columns."""
    if type(kernel) is _Constant:
        return False
    if type(kernel) in (Sum, Product):
        return any(_depends_on(part, num_columns) for part in kernel.kernels)
    return kernel.active_dims is None or min(kernel.active_dims) < num_columns
