"""Linear kernel."""

from collections.abc import Sequence

from torch import Tensor

from pyro_lvgp.kernels._parametric import _Parametric, _Value
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.ops import covariance

__all__ = ["Linear"]


class Linear(_Parametric):
    r"""Linear kernel, the covariance function of Bayesian linear regression and of factor analysis.

    .. math:: k(x, z) = \sum_q v_q x_q z_q

    :param input_dim: number of columns on which the kernel acts.
    :param variance: v, the prior variance of the weights, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not
        ``ard``.
    :param ard: whether each column has a variance of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a variance is not positive, or has the wrong shape.
    :raises TypeError: if ``input_dim`` is no integer.

    Source: Rasmussen and Williams (2006), section 4.2.2.

    >>> import torch
    >>> Linear(2).diagonal(torch.tensor([[3.0, 4.0]])).detach()
    tensor([25.])
    """

    variance: Tensor

    def __init__(
        self,
        input_dim: int,
        *,
        variance: _Value = 1.0,
        ard: bool = True,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        columns = (input_dim if ard else 1,)
        super().__init__(input_dim, batch_shape, active_dims, {"variance": (variance, columns)})

    def params(self) -> KernelParams:
        return (self._per_column("variance"),)

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        (variance,) = params
        return covariance.linear(X, Z, variance)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        (variance,) = params
        return (X.square() * variance.unsqueeze(-2)).sum(-1)
