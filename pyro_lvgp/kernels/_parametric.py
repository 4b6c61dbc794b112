"""Base of kernels with parameters in open intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_lvgp.kernels.base import Kernel

_Value = float | int | Tensor
_POSITIVE = (0.0, math.inf)
_REAL = (-math.inf, math.inf)


class _Parametric(Kernel):
    """Base class of kernels with parameters in open intervals."""

    def __init__(
        self,
        input_dim: int,
        batch_shape: Sequence[int],
        active_dims: Sequence[int] | None,
        parameters: dict[str, tuple[_Value, tuple[int, ...]]],
        intervals: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Create the parameters ``{name: (value, shape after the batch shape)}``, positive unless they have an interval."""
        super().__init__(input_dim, batch_shape=batch_shape, active_dims=active_dims)
        values = [torch.as_tensor(value) for value, _ in parameters.values() if isinstance(value, Tensor)]
        like = next((value for value in values if value.is_floating_point()), torch.empty(()))
        for name, (value, event_shape) in parameters.items():
            shape = (*batch_shape, *event_shape)
            tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
            lower, upper = interval = (intervals or {}).get(name, _POSITIVE)
            if isinstance(value, bool) or not ((tensor > lower) & (tensor < upper)).all():
                raise ValueError(f"expected finite {name}{_advice(interval, value)}")
            try:
                tensor = tensor.expand(shape)
            except RuntimeError as error:
                raise ValueError(
                    f"expected {name} that expands to {list(shape)} (batch_shape first), got shape "
                    f"{list(tensor.shape)}; give a number, or a tensor of that shape."
                ) from error
            setattr(self, name, PyroParam(tensor.clone(), _constraint(interval)))

    def _per_column(self, name: str) -> Float[Tensor, "*batch columns"]:
        """Read a parameter whose last dimension has one entry per column, or one for all columns."""
        value: Tensor = getattr(self, name)
        if not value.shape or value.shape[-1] not in (1, self.input_dim):
            raise ValueError(
                f"expected {name} with last dimension {self.input_dim} (or 1), got shape {list(value.shape)}; "
                f"give its prior one event dimension: prior.expand([{self.input_dim}]).to_event(1)."
            )
        return value

    def _of_shape(self, name: str, shape: tuple[int, ...]) -> Float[Tensor, "*out"]:
        """Read a parameter with the given last dimensions."""
        value: Tensor = getattr(self, name)
        if value.shape[-len(shape) :] != shape:
            raise ValueError(
                f"expected {name} with last dimensions {list(shape)}, got shape {list(value.shape)}; give its prior "
                f"{len(shape)} event dimensions: prior.expand({list(shape)}).to_event({len(shape)})."
            )
        return value


def _constraint(interval: tuple[float, float]) -> Any:
    if interval == _POSITIVE:
        # Softplus grows linearly where exp would overflow after one long optimiser step.
        return constraints.softplus_positive
    return constraints.real if interval == _REAL else constraints.interval(*interval)


def _advice(interval: tuple[float, float], value: _Value) -> str:
    """Return the range, the value and what to do, for the error of a value outside the interval."""
    if interval == _POSITIVE:
        return f" > 0, got {value}; give the value itself, not its logarithm."
    if interval == _REAL:
        return f" numbers, got {value}; replace NaN and infinity."
    return f" between {interval[0]:g} and {interval[1]:g}, both excluded, got {value}; take a value of that range."
