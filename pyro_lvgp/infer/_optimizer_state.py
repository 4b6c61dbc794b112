"""Check of the state of an optimiser against its parameter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# States of torch's optimisers that have the shape of the parameter.
_MOMENTS = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
        *("grad_avg", "acc_delta", "sum", "ax", "prev", "step_size"),
    }
)


def check_optimizer_state(state: Mapping[str, Any], param: Tensor, name: str) -> None:
    """Raise unless the tensors of an optimiser's state fit its parameter: fused optimisers do not check their sizes.

    :param state: state of the parameter, such as its moments.
    :param param: the parameter.
    :param name: name of the parameter, for the error.
    :raises ValueError: for moments of another shape or dtype.

    >>> check_optimizer_state({"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}, torch.zeros(2), "x")
    """
    for key in _MOMENTS & state.keys():
        moment = state[key]
        if moment is not None and (moment.shape, moment.dtype) != (param.shape, param.dtype):
            raise ValueError(
                f"expected the state of an optimiser of {name!r}, of shape {list(param.shape)} and {param.dtype}, got "
                f"{key} of shape {list(moment.shape)} and {moment.dtype}; load the state of this model and guide"
            )
    step = state.get("step")
    if torch.is_tensor(step) and step.numel() != 1 and step.shape != param.shape[:1]:  # RowAdam counts the steps of each row
        raise ValueError(f"expected one number of steps of {name!r}, got {list(step.shape)}; load the state of this model")
