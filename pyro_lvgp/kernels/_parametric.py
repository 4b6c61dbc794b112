"""Base of kernels with positive parameters."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_lvgp.kernels.base import Kernel

_Value = float | int | Tensor


class _Parametric(Kernel):
    """Base class of kernels with positive parameters."""

    def __init__(
        self,
        input_dim: int,
        batch_shape: Sequence[int],
        active_dims: Sequence[int] | None,
        parameters: dict[str, tuple[_Value, tuple[int, ...]]],
    ) -> None:
        """Create the positive parameters ``{name: (value, shape after the batch shape)}``."""
        super().__init__(input_dim, batch_shape=batch_shape, active_dims=active_dims)
        values = [torch.as_tensor(value) for value, _ in parameters.values() if isinstance(value, Tensor)]
        like = next((value for value in values if value.is_floating_point()), torch.empty(()))
        for name, (value, event_shape) in parameters.items():
            shape = (*batch_shape, *event_shape)
            tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
            if isinstance(value, bool) or not ((tensor > 0) & (tensor < torch.inf)).all():
                raise ValueError(f"expected finite {name} > 0, got {value}; give the value itself, not its logarithm.")
            try:
                tensor = tensor.expand(shape)
            except RuntimeError as error:
                raise ValueError(
                    f"expected {name} that expands to {list(shape)} (batch_shape, then columns), got shape "
                    f"{list(tensor.shape)}; give a number, or a tensor of that shape."
                ) from error
            # Softplus grows linearly where exp would overflow after one long optimiser step.
            setattr(self, name, PyroParam(tensor.clone(), constraints.softplus_positive))

    def _per_column(self, name: str) -> Float[Tensor, "*batch columns"]:
        """Read a parameter whose last dimension has one entry per column, or one for all columns."""
        value: Tensor = getattr(self, name)
        if not value.shape or value.shape[-1] not in (1, self.input_dim):
            raise ValueError(
                f"expected {name} with last dimension {self.input_dim} (or 1), got shape {list(value.shape)}; "
                f"give its prior one event dimension: prior.expand([{self.input_dim}]).to_event(1)."
            )
        return value
