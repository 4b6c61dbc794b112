"""Periodic and cosine kernels."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.kernels._parametric import _Parametric, _Value
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.kernels.stationary import _Stationary
from pyro_lvgp.ops import covariance
from pyro_lvgp.ops.state_space import StateSpaceModel, cosine

__all__ = ["Cosine", "Periodic"]


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


class Cosine(_Parametric):
    r"""Cosine kernel, of sinusoids with random amplitude and phase.

    .. math:: k(x, z) = \sigma^2 \prod_q \cos\big(2 \pi (x_q - z_q) / p_q\big)

    Sums of cosine kernels of periods p, p/2, p/3, … are Fourier series of periodic kernels.  Times a
    :class:`~pyro_lvgp.kernels.Matern` kernel they are quasi-periodic.  For one column of inputs all of these are Markov, so
    that inference takes linear time.

    :param input_dim: number of columns on which the kernel acts.
    :param period: p in units of the inputs, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not ``ard``.
    :param variance: σ², of shape ``batch_shape``.
    :param ard: whether each column has a period of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a parameter is not positive, or has the wrong shape.
    :raises TypeError: if ``input_dim`` is no integer.

    Source: Solin and Särkkä (2014), "Explicit link between periodic covariance functions and state space models".

    >>> Cosine(1, period=7.0)(torch.tensor([[0.0]]), torch.tensor([[0.0], [3.5], [7.0]])).detach()
    tensor([[ 1., -1.,  1.]])
    >>> from pyro_lvgp.kernels import Matern
    >>> daily = Matern(1, 0.5, lengthscale=240.0) * (Cosine(1, period=24.0) + Cosine(1, period=12.0, variance=0.5))
    >>> daily.is_markov
    True
    """

    variance: Tensor
    period: Tensor

    def __init__(
        self,
        input_dim: int,
        period: _Value = 1.0,
        *,
        variance: _Value = 1.0,
        ard: bool = True,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        columns = (input_dim if ard else 1,)
        super().__init__(input_dim, batch_shape, active_dims, {"variance": (variance, ()), "period": (period, columns)})

    def params(self) -> KernelParams:
        return self.variance, self._per_column("period")

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        variance, period = params
        return covariance.cosine(X, Z, period, variance)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        variance, period = params
        batch = torch.broadcast_shapes(X.shape[:-2], variance.shape, period.shape[:-1])
        return variance[..., None].expand(*batch, X.shape[-2])

    @property
    def is_markov(self) -> bool:
        return type(self) is Cosine and self.input_dim == 1 and self.active_dims is None

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        variance, period = params
        return cosine(steps, period.squeeze(-1), variance)
