"""The linear kernel."""

from collections.abc import Sequence

from torch import Tensor

from pyro_lvgp.kernels._parametric import _Parametric, _Value
from pyro_lvgp.kernels.base import Params
from pyro_lvgp.ops import covariance


class Linear(_Parametric):
    r"""Linear kernel: that of Bayesian linear regression, and of factor analysis.

    .. math:: k(x, z) = \sum_q v_q x_q z_q

    :param input_dim: number of columns the kernel acts on.
    :param variance: v, the prior variance of the weights, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not
        ``ard``.
    :param ard: whether every column has a variance of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: the columns to act on; all by default.
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

    def params(self) -> Params:
        return (self._per_column("variance"),)

    def _covariance(self, X: Tensor, Z: Tensor, params: Params) -> Tensor:
        (variance,) = params
        return covariance.linear(X, Z, variance)

    def _diagonal(self, X: Tensor, params: Params) -> Tensor:
        (variance,) = params
        return (X.square() * variance.unsqueeze(-2)).sum(-1)
