"""Stationary kernels: squared exponential, rational quadratic and Matérn."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.kernels._parametric import _Parametric, _Value
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.ops import covariance
from pyro_lvgp.ops.state_space import StateSpaceModel, matern

__all__ = ["RBF", "Matern", "RationalQuadratic"]

_COVARIANCE_METHODS = {"k", "covariance", "k_diagonal", "diagonal", "_select", "params"}


class _Stationary(_Parametric):
    """Base class of stationary kernels, with a variance, and parameters of each column such as lengthscales."""

    variance: Tensor
    lengthscale: Tensor

    def __init__(
        self,
        input_dim: int,
        *,
        variance: _Value,
        lengthscale: _Value,
        ard: bool,
        batch_shape: Sequence[int],
        active_dims: Sequence[int] | None,
        scalars: Mapping[str, _Value] | None = None,
        **per_column: _Value,
    ) -> None:
        columns = (input_dim if ard else 1,)
        vectors = {"lengthscale": lengthscale, **per_column}
        super().__init__(
            input_dim,
            batch_shape,
            active_dims,
            {
                "variance": (variance, ()),
                **{name: (value, columns) for name, value in vectors.items()},
                **{name: (value, ()) for name, value in (scalars or {}).items()},
            },
        )

    def params(self) -> KernelParams:
        return self.variance, self._per_column("lengthscale")

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        variance, lengthscale, *_ = params
        # The batch shape is that of the matrix, which depends on the lengthscale too.
        batch = torch.broadcast_shapes(X.shape[:-2], variance.shape, lengthscale.shape[:-1])
        return variance[..., None].expand(*batch, X.shape[-2])


class RBF(_Stationary):
    r"""Squared exponential kernel, of functions that are infinitely often differentiable.

    .. math:: k(x, z) = \sigma^2 \exp\Bigl(-\tfrac12 \sum_q (x_q - z_q)^2 / \ell_q^2\Bigr)

    :param input_dim: number of columns on which the kernel acts.
    :param variance: σ², of shape ``batch_shape``.
    :param lengthscale: ℓ in units of the inputs, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not ``ard``.
    :param ard: whether each column has a lengthscale of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a parameter is not positive, or has the wrong shape.
    :raises TypeError: if ``input_dim`` is no integer.

    Source: Rasmussen and Williams (2006), eq. 4.9.

    >>> kernel = RBF(2, variance=2.0, lengthscale=torch.tensor([0.5, 1.0]))
    >>> X, Z = torch.zeros(3, 2), torch.ones(4, 2)
    >>> kernel(X, Z).shape, kernel.diagonal(X).shape
    (torch.Size([3, 4]), torch.Size([3]))

    A prior on the lengthscale:

    >>> import pyro.distributions as dist
    >>> from pyro.nn import PyroSample
    >>> kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    """

    def __init__(
        self,
        input_dim: int,
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
        )

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        variance, lengthscale = params
        return covariance.rbf(X, Z, lengthscale, variance)


class RationalQuadratic(_Stationary):
    r"""Rational quadratic kernel, a mixture of squared exponential kernels of different lengthscales.

    .. math:: k(x, z) = \sigma^2 \Bigl(1 + \frac{1}{2\alpha} \sum_q (x_q - z_q)^2 / \ell_q^2\Bigr)^{-\alpha}

    The inverse squared lengthscales of the mixture have a gamma distribution of shape α.  For large α the kernel is
    :class:`RBF`.

    :param input_dim: number of columns on which the kernel acts.
    :param alpha: α, of shape ``batch_shape``.
    :param variance: σ², of shape ``batch_shape``.
    :param lengthscale: ℓ in units of the inputs, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not ``ard``.
    :param ard: whether each column has a lengthscale of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a parameter is not positive, or has the wrong shape.
    :raises TypeError: if ``input_dim`` is no integer.

    Source: Rasmussen and Williams (2006), eq. 4.19.

    >>> RationalQuadratic(1, alpha=2.0)(torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]])).detach()
    tensor([[1.0000, 0.2500]])
    """

    alpha: Tensor

    def __init__(
        self,
        input_dim: int,
        alpha: _Value = 1.0,
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
            scalars={"alpha": alpha},
        )

    def params(self) -> KernelParams:
        return *super().params(), self.alpha

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        variance, lengthscale, alpha = params
        return covariance.rational_quadratic(X, Z, lengthscale, variance, alpha)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        variance, lengthscale, alpha = params
        return super().k_diagonal(X, (variance.expand(torch.broadcast_shapes(variance.shape, alpha.shape)), lengthscale))


class Matern(_Stationary):
    r"""Matérn kernel of smoothness ν = ½, 3⁄2 or 5⁄2, of functions that are 0, 1 or 2 times differentiable.

    .. math:: k(x, z) = \sigma^2 \times \begin{cases}
        e^{-r} & \nu = 1/2 \\
        (1 + \sqrt3 r) e^{-\sqrt3 r} & \nu = 3/2 \\
        (1 + \sqrt5 r + \tfrac53 r^2) e^{-\sqrt5 r} & \nu = 5/2
        \end{cases}, \qquad r^2 = \sum_q (x_q - z_q)^2 / \ell_q^2

    Distances are computed from differences, which needs memory for N·M·Q numbers.  With one input and without ``active_dims``
    functions are Gauss–Markov processes, and :attr:`is_markov` is true.  In a subclass with another covariance function
    :attr:`is_markov` is false, unless the subclass overrides :meth:`state_space_model` or :attr:`is_markov` too.

    :param input_dim: number of columns on which the kernel acts.
    :param nu: ν, one of 0.5, 1.5, 2.5.
    :param variance: σ², of shape ``batch_shape``.
    :param lengthscale: ℓ in units of the inputs, of shape ``batch_shape + (input_dim,)``, or ``+ (1,)`` if not ``ard``.
    :param ard: whether each column has a lengthscale of its own.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a parameter is not positive or has the wrong shape, or ``nu`` is none of the three.
    :raises TypeError: if ``input_dim`` is no integer.

    Source: Rasmussen and Williams (2006), eqs. 4.16 and 4.17.

    >>> kernel = Matern(1, 2.5, lengthscale=0.2, batch_shape=(3,))
    >>> kernel(torch.randn(10, 1)).shape
    torch.Size([3, 10, 10])
    """

    _has_state_space_model: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Declare a subclass with another covariance function as not Markov, unless it has a state-space model of its own."""
        super().__init_subclass__(**kwargs)
        mixins = [base for base in cls.__bases__ if not issubclass(base, Matern)]
        overridden = set().union(*(vars(part) for part in (cls, *mixins)))
        if "state_space_model" in vars(cls):
            cls._has_state_space_model = True
        elif overridden & _COVARIANCE_METHODS:
            cls._has_state_space_model = False

    def __init__(
        self,
        input_dim: int,
        nu: float = 1.5,
        *,
        variance: _Value = 1.0,
        lengthscale: _Value = 1.0,
        ard: bool = True,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        if nu not in (0.5, 1.5, 2.5):
            raise ValueError(f"expected nu of 0.5, 1.5 or 2.5, got {nu}; for smoother functions use RBF.")
        super().__init__(
            input_dim,
            variance=variance,
            lengthscale=lengthscale,
            ard=ard,
            batch_shape=batch_shape,
            active_dims=active_dims,
        )
        self.nu = nu

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        variance, lengthscale = params
        return covariance.matern(X, Z, lengthscale, variance, self.nu)

    @property
    def is_markov(self) -> bool:
        return self._has_state_space_model and self.input_dim == 1 and self.active_dims is None

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        variance, lengthscale = params
        return matern(steps, lengthscale.squeeze(-1), variance, self.nu)
