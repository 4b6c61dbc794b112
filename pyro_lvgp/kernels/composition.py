"""Sums, products and batches of kernels."""

import math
import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from pyro.nn.module import PyroModuleList
from torch import Tensor

from pyro_lvgp.kernels.base import Kernel, KernelParams
from pyro_lvgp.ops.state_space import StateSpaceModel, add, constant, multiply, pad

__all__ = ["Combination", "Product", "Stack", "Sum"]


class _Constant(Kernel):
    """Constant kernel k(x, z) = c, for a number c ≥ 0 that is not learned."""

    def __init__(self, value: float | int) -> None:
        super().__init__()
        if not 0 <= value < math.inf:
            raise ValueError(f"expected a finite number ≥ 0 in a sum or product of kernels, got {value}; it is a variance.")
        self.value = float(value)

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        batch = torch.broadcast_shapes(X.shape[:-2], Z.shape[:-2])
        return X.new_full((), self.value).expand(*batch, X.shape[-2], Z.shape[-2])

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        return X.new_full((), self.value).expand(X.shape[:-1])

    is_markov = True

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        return constant(steps, self.value)

    def parameters_text(self) -> str:
        return f"{self.value:g}"


class Combination(Kernel):
    """Base class of kernels that are functions of other kernels.

    A subclass implements :meth:`k` and :meth:`k_diagonal` from the matrices and variances of the parts, which
    :meth:`covariances` and :meth:`diagonals` compute.

    :param kernels: the parts; a number c ≥ 0 is the constant kernel k(x, z) = c.
    :raises ValueError: if there are none.

    >>> class Convex(Combination):  # w k₁ + (1 − w) k₂
    ...     def k(self, X, Z, params):
    ...         first, second = self.covariances(X, Z, params)
    ...         return 0.3 * first + 0.7 * second
    ...
    ...     def k_diagonal(self, X, params):
    ...         first, second = self.diagonals(X, params)
    ...         return 0.3 * first + 0.7 * second
    >>> Convex(1.0, 2.0)(torch.zeros(2, 1))
    tensor([[1.7000, 1.7000],
            [1.7000, 1.7000]])
    """

    def __init__(self, *kernels: Kernel | float | int) -> None:
        if not kernels:
            raise ValueError(f"expected one or more kernels, got none; give kernels to {type(self).__name__}(...).")
        parts = [k if isinstance(k, Kernel) else _Constant(k) for k in kernels]
        super().__init__(batch_shape=self.combine_batch_shapes([k.batch_shape for k in parts]))
        self.kernels: Iterable[Any] = PyroModuleList(parts)

    def combine_batch_shapes(self, shapes: list[torch.Size]) -> Sequence[int]:
        """Compute the batch shape from those of the parts; by default they broadcast.

        :param shapes: batch shape of each part.
        """
        return torch.broadcast_shapes(*shapes)

    def check_columns(self, num_columns: int, name: str = "X") -> None:
        for k in self.kernels:
            k.check_columns(num_columns, name)

    @property
    def level_columns(self) -> tuple[int, ...]:
        return tuple(sorted({column for k in self.kernels for column in k.level_columns}))

    # The parts are read without entering Pyro's context: a call of this kernel has entered that of its owner already.
    def params(self) -> KernelParams:
        return tuple(k.params() for k in self.kernels)

    def covariances(self, X: Tensor, Z: Tensor, params: KernelParams) -> list[Float[Tensor, "*_ N M"]]:
        """Compute the covariance matrix of each part.

        :param X: N points.
        :param Z: M points.
        :param params: parameters of each part.
        """
        return [k.covariance(X, Z, part) for k, part in zip(self.kernels, params, strict=True)]

    def diagonals(self, X: Tensor, params: KernelParams) -> list[Float[Tensor, "*_ N"]]:
        """Compute the variances of each part.

        :param X: N points.
        :param params: parameters of each part.
        """
        return [k.diagonal(X, part) for k, part in zip(self.kernels, params, strict=True)]

    def parameters_text(self) -> str:
        return ", ".join(f"{type(k).__name__.strip('_')}({k.parameters_text()})" for k in self.kernels)


class _StateSpaceCombination(Combination):
    """Base class of combinations that are Markov if all their parts are."""

    @property
    def is_markov(self) -> bool:
        return all(k.is_markov for k in self.kernels)

    def state_space_models(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> list[StateSpaceModel]:
        """State-space model of each part, for parts with ``is_markov``.

        :param steps: differences of successive inputs.
        :param params: parameters of each part.
        """
        return [k.state_space_model(steps, part) for k, part in zip(self.kernels, params, strict=True)]


class Sum(_StateSpaceCombination):
    """Sum of kernels, ``k(x, z) = Σ_i k_i(x, z)``, also written ``k1 + k2`` or ``k + 0.1``.

    :param kernels: kernels, or finite numbers ≥ 0, each of which is a constant kernel and not learned.
    :raises ValueError: if there is no kernel, a number is negative or not finite, or a sum or product has run in a model.

    Source: Rasmussen and Williams (2006), section 4.2.4.

    >>> from pyro_lvgp.kernels import RBF, Linear
    >>> kernel = RBF(2, lengthscale=0.5) + Linear(2)
    >>> kernel(torch.randn(4, 10, 2)).shape
    torch.Size([4, 10, 10])
    """

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        return reduce(operator.add, self.covariances(X, Z, params))

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        return reduce(operator.add, self.diagonals(X, params))

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        return add(self.state_space_models(steps, params))


class Product(_StateSpaceCombination):
    """Product of kernels, ``k(x, z) = Π_i k_i(x, z)``, also written ``k1 * k2`` or ``2.0 * k``.

    :param kernels: kernels, or finite numbers ≥ 0, each of which is a constant kernel and not learned.
    :raises ValueError: if there is no kernel, a number is negative or not finite, or a sum or product has run in a model.

    Source: Rasmussen and Williams (2006), section 4.2.4.

    >>> from pyro_lvgp.kernels import Matern, Periodic
    >>> kernel = 0.5 * Matern(1, 2.5, lengthscale=10.0) * Periodic(1, period=7.0)
    >>> kernel.diagonal(torch.randn(3, 1)).detach()
    tensor([0.5000, 0.5000, 0.5000])
    """

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        return reduce(operator.mul, self.covariances(X, Z, params))

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        return reduce(operator.mul, self.diagonals(X, params))

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        return reduce(multiply, self.state_space_models(steps, params))


class Stack(_StateSpaceCombination):
    """Batch of different kernels ``k_q(x, z)``, q = 1 … Q, for Q independent functions.

    Points ``[*batch, 1, N, P]``, or ``[N, P]``, give matrices ``[*batch, Q, N, M]``.

    :param kernels: kernels of batch shape ``()``, each of which is one kernel of the batch, or ``(q,)``.
    :raises ValueError: if a kernel has another batch shape, a batch of points has no dimension of size 1 for the kernels, or a
        sum or product has run in a model.

    >>> from pyro_lvgp.kernels import RBF, Periodic
    >>> kernel = Stack(RBF(1, batch_shape=(2,)), RBF(1) * Periodic(1))
    >>> kernel(torch.randn(10, 1)).shape
    torch.Size([3, 10, 10])
    """

    def combine_batch_shapes(self, shapes: list[torch.Size]) -> Sequence[int]:
        if any(len(shape) > 1 for shape in shapes):
            raise ValueError(
                f"expected kernels of batch shape () or (q,), got {list(map(tuple, shapes))}; stack kernels of fewer "
                "dimensions"
            )
        return (sum(shape.numel() for shape in shapes),)

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        return self._concatenate(self.covariances(X, Z, params), 2)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        return self._concatenate(self.diagonals(X, params), 1)

    def state_space_model(self, steps: Float[Tensor, "*#batch T"], params: KernelParams) -> StateSpaceModel:
        models = self.state_space_models(steps, params)
        size = max(model.emission.shape[-1] for model in models)
        P, A, Q, h = zip(*(pad(model, size) for model in models), strict=True)
        return StateSpaceModel(
            self._concatenate(P, 2), self._concatenate(A, 3), self._concatenate(Q, 3), self._concatenate(h, 1)
        )

    def _concatenate(self, parts: Sequence[Tensor], event_dim: int) -> Tensor:
        """Concatenate ``[*batch, q, *event]`` along q; a part ``[*event]`` has q = 1."""
        parts = [part if part.dim() > event_dim else part.unsqueeze(0) for part in parts]
        batch = torch.broadcast_shapes(*(part.shape[: -event_dim - 1] for part in parts))
        stack = torch.cat([part.expand(*batch, *part.shape[-event_dim - 1 :]) for part in parts], -event_dim - 1)
        if (got := stack.shape[-event_dim - 1]) != (expected := self.batch_shape[0]):
            raise ValueError(
                f"expected {expected} kernels, got {got} from a batch of points or parameters; give points as "
                "X.unsqueeze(-3), and kernels that have priors batch_shape=(1,)"
            )
        return stack
