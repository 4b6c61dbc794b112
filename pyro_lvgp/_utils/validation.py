"""Validation of arguments."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_AS_TENSOR = "use pyro_lvgp.tables.as_tensor(...)"  # for lists, arrays and data frames


def check_data(Y: Tensor, data_dim: int, *, like: Tensor, name: str = "y") -> None:
    """Raise unless Y is a float32 or float64 [rows, data_dim] tensor on the device and of the dtype of ``like``."""
    if not torch.is_tensor(Y):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(Y).__name__}; {_AS_TENSOR}")
    if Y.dim() != 2 or Y.shape[-1] != data_dim:
        raise ValueError(
            f"expected {name} of shape [rows, {data_dim}], got {list(Y.shape)}; rows are data points and columns are outputs"
        )
    check_not_empty(Y, name)
    _check_precision(Y, name)
    if Y.dtype != like.dtype:
        raise TypeError(
            f"expected {name} of the model's dtype {like.dtype}, got {Y.dtype}; use {name}.to({like.dtype}) or "
            f"model.to({Y.dtype})"
        )
    if Y.device != like.device:
        raise ValueError(
            f"expected {name} on the model's device {like.device}, got {Y.device}; use {name}.to({str(like.device)!r}) or "
            f"model.to({str(Y.device)!r})"
        )


def _check_precision(Y: Tensor, name: str) -> None:
    """Raise unless the dtype is float32 or float64, for which torch has matrix factorisations."""
    if Y.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"expected {name} of a floating-point dtype, torch.float32 or torch.float64, got {Y.dtype}; use .float() or "
            ".double(), and the same for model and guide"
        )


def check_tensors(args: Sequence[Any]) -> None:
    """Raise unless all arguments are tensors."""
    for arg in args:
        if not torch.is_tensor(arg):
            raise TypeError(f"expected data to be tensors, got {type(arg).__name__}; {_AS_TENSOR}")


def check_sizes(*, least: int = 1, **sizes: int) -> None:
    """Raise unless every size is an integer of at least ``least``.

    :param least: smallest valid size.
    :param sizes: sizes by the names of the arguments.
    """
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            raise TypeError(f"expected {name} to be an integer, got {size!r}; use int(...)")
        if size < least:
            raise ValueError(f"expected {name} of {least} or more, got {size}")


def check_device(device: torch.device | str | None) -> None:
    """Raise unless the device is None, or one that torch knows."""
    try:
        torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"expected a device such as 'cpu' or 'cuda:0', got {device!r}") from error


def check_init_scale(init_scale: float) -> None:
    """Raise unless the initial scale of a guide is positive and finite."""
    if isinstance(init_scale, bool) or not 0 < init_scale < math.inf:
        raise ValueError(f"expected a positive and finite init_scale, got {init_scale}; pass the scale, not its logarithm")


def check_bound(loss: float) -> None:
    """Raise if minus a bound is NaN or infinite, before a gradient step would make all parameters NaN."""
    if not math.isfinite(loss):
        raise ValueError(
            f"expected a finite bound, but it became {'NaN' if math.isnan(loss) else 'infinite'}; parameters are those before "
            "this step; try a smaller learning rate, model and data in torch.float64, or initialize() of the model"
        )


def check_not_empty(rows: Tensor, name: str) -> None:
    """Raise if a tensor of data has no entries."""
    check_tensors([rows])
    if not rows.numel():
        raise ValueError(f"expected {name} with one row or more, got none; skip empty batches")


def check_values(Y: Tensor, *, rows: bool = True, columns: bool = True, name: str = "y") -> None:
    """Raise if an entry is infinite, or a whole row or column is missing (NaN)."""
    if torch.isinf(Y).any():
        row, column = torch.isinf(Y).nonzero()[0].tolist()
        raise ValueError(
            f"expected finite entries or NaN for missing ones, got {Y[row, column].item():g} at {name}[{row}, {column}]; "
            "replace the entry by NaN if it is missing, or by its correct value"
        )
    missing = torch.isnan(Y)
    for is_checked, dim, axis in ((rows, 1, "row"), (columns, 0, "column")):
        empty = missing.all(dim)
        if is_checked and empty.any():
            raise ValueError(
                f"expected an observed entry in every {axis} of {name}, got {int(empty.sum())} {axis}(s) with none, the "
                f"first at {axis} {int(empty.nonzero()[0])}; drop them"
            )


def check_index(idx: Tensor | None, num_rows: int, num_data: int) -> None:
    """Raise unless ``idx`` has one index into the data for each of ``num_rows`` rows."""
    if idx is None:
        if num_rows != num_data:
            raise ValueError(
                f"expected all {num_data} rows, or a mini-batch with its indices, got {num_rows} rows and no idx; pass (y, "
                "idx), or infer the latents of new rows first: impute(guide, Y, latents=model.infer_latents(guide, Y))"
            )
        return
    if not torch.is_tensor(idx) or idx.dtype != torch.long or idx.shape != (num_rows,):
        raise ValueError(
            f"expected idx to be a torch.long tensor with one index for each of {num_rows} rows, got "
            f"{f'{idx.dtype} of shape {list(idx.shape)}' if torch.is_tensor(idx) else type(idx).__name__}"
        )
    if idx.numel() and not (int(idx.min()) >= 0 and int(idx.max()) < num_data):
        raise IndexError(
            f"expected indices in 0…{num_data - 1}, got {int(idx.min())}…{int(idx.max())}; num_data of the model is {num_data}"
        )


def position_of_data(args: Sequence[Any]) -> int:
    """Position of the data among a model's arguments: that of the last floating-point tensor.

    :param args: positional arguments of the model.
    :raises ValueError: if no argument is a floating-point tensor.
    :raises TypeError: if an integer tensor with more than one dimension, which may be data, is among the later arguments.
    """
    for position in reversed(range(len(args))):
        if torch.is_tensor(args[position]) and args[position].is_floating_point():
            return position
        if torch.is_tensor(args[position]) and args[position].dim() > 1:
            raise TypeError(
                f"expected data of a floating-point dtype, got {args[position].dtype}; use y.to(torch.get_default_dtype())"
            )
    raise ValueError(f"expected data among the arguments of the model, got {[type(arg).__name__ for arg in args]}; pass y")


def check_positional(kwargs: Mapping[str, Any]) -> None:
    """Raise if a keyword argument may be data, which :func:`position_of_data` finds among positional arguments only."""
    if names := [name for name, value in kwargs.items() if torch.is_tensor(value) and value.is_floating_point()]:
        raise TypeError(f"expected data by position, as in guide(t, y), got keyword arguments {names}")


def check_series(x: Tensor, y: Tensor) -> None:
    """Raise unless x [..., N, P] are inputs for the data y [..., N, D] of one series or of several."""
    check_inputs(x, y)
    check_values(y.reshape(-1, y.shape[-1]), rows=False)


def check_inputs(x: Tensor, y: Tensor) -> None:
    """Raise unless x [..., N, P] are finite inputs of data y [..., N, D], of the same dtype and device."""
    check_tensors((x, y))
    fits = y.dim() in (2, 3) and x.dim() in (2, y.dim()) and x.shape[-2] == y.shape[-2] and x.shape[:-2] in ((), y.shape[:-2])
    if not fits:
        raise ValueError(
            "expected inputs [points, columns] and data [points, outputs], or [series, points, ...] of either, got "
            f"{list(x.shape)} and {list(y.shape)}; a single column needs [:, None], and each point an input"
        )
    _check_numbers(x, y)


def check_new_inputs(x_new: Tensor, x: Tensor, y: Tensor) -> None:
    """Raise unless x_new [..., M, P] are finite inputs like x [..., N, P], of the data's dtype and device."""
    check_not_empty(x_new, "x")
    if x_new.dim() < 2 or x_new.shape[:-2] not in ((), y.shape[:-2]) or x_new.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"expected new inputs [points, columns], or [series, points, columns] for the series of the data, "
            f"{list(y.shape[:-2])}, of {x.shape[-1]} columns, got {list(x_new.shape)}; a single column needs [:, None]"
        )
    _check_numbers(x_new, y)


def _check_numbers(x: Tensor, y: Tensor) -> None:
    if not (x.is_floating_point() and x.dtype == y.dtype and x.device == y.device):
        raise TypeError(f"expected inputs and data of one floating-point dtype and device, got {x.dtype} and {y.dtype}")
    _check_precision(y, "inputs and data")
    if not torch.isfinite(x).all():
        raise ValueError("expected finite inputs, got NaN or infinity; pad series with any input and rows of NaN in the data")
