"""Tensors of PyTorch's inference mode."""

from typing import Any

from torch import Tensor

__all__ = ["outside_inference_mode"]


def outside_inference_mode(value: Any) -> Any:
    """Clone a tensor made in inference mode, which autograd does not accept; return anything else as it is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
