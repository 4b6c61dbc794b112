"""Periodic kernel."""

from collections.abc import Sequence

from torch import Tensor

from pyro_lvgp.kernels._parametric import _Value
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.kernels.stationary import _Stationary
from pyro_lvgp.ops import covariance

__all__ = ["Periodic"]


class Periodic(_Stationary):
    r"""Periodic kernel.

    .. math:: k(x, z) = \sigma^2 \exp\Bigl(-2 \sum_q \sin^2(\pi (x_q - z_q) / p_q) / \ell_q^2\Bigr)

    GPyTorch's ``PeriodicKernel`` divides by ℓ; this kernel divides by ℓ², as its source does.

    :param input_dim: number of columns on which the kernel acts.
    :param period: p in units of the inputs, of the same shape as ``lengthscale``.
    :param variance: σ², of shape ``batch_shape``.
    :param lengthscale: ℓ, dimensionless, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not ``ard``.
    :param ard: whether each column has a lengthscale and a period of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a parameter is not positive, or has the wrong shape.
    :raises TypeError: if ``input_dim`` is no integer.

    Source: MacKay (1998), "Introduction to Gaussian processes"; Rasmussen and Williams (2006), eq. 4.31.

    >>> import torch
    >>> Periodic(1, period=7.0)(torch.tensor([[0.0]]), torch.tensor([[0.0], [3.5], [7.0]])).detach()
    tensor([[1.0000, 0.1353, 1.0000]])
    """

    period: Tensor

    def __init__(
        self,
        input_dim: int,
        period: _Value = 1.0,
        *,
        variance: _Value = 1.0,
        lengthscale: _Value = 1.0,
        ard: bool = True,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            input_dim,
            variance=variance,
            lengthscale=lengthscale,
            ard=ard,
            batch_shape=batch_shape,
            active_dims=active_dims,
            period=period,
        )

    def params(self) -> KernelParams:
        return *super().params(), self._per_column("period")

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        variance, lengthscale, period = params
        return covariance.periodic(X, Z, period, lengthscale, variance)
