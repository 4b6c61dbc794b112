"""Fingerprints of what a script makes anew when a fit is resumed: data, structure of model and guide, and settings."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.elbo.compiled import CompiledELBO

__all__ = ["SavedFingerprint", "digest"]

_CHANGES_IN_FITS = frozenset({"training", "max_plate_nesting", "argument_shapes"})


class SavedFingerprint:
    """Data, structure and settings of a fit, which must be those of the checkpoint.

    :param state: the fit.
    """

    def __init__(self, state: FitState):
        self._own = {f"data[{i}]": digest(arg) for i, arg in enumerate(state.args)} | {"seed": repr(state.seed)}
        for name, part in (("model", state.model), ("guide", state.guide)):
            self._own |= _structure(name, part)
        bound = state.svi.loss if isinstance(state.svi, BlockCoordinateVI) else state.svi.bound
        self._own |= _settings("loss", bound.bound if isinstance(bound, CompiledELBO) else bound)
        if not isinstance(state.svi, BlockCoordinateVI):
            self._own |= {f"optim.{name}": repr(value) for name, value in _arguments(state.svi.optim).items()}

    def state_dict(self) -> dict[str, str]:
        """Return texts and digests by name."""
        return self._own

    def check_state(self, state: Mapping[str, str]) -> None:
        """Raise unless a checkpoint has the same fingerprint.

        :param state: returned by :meth:`state_dict`.
        :raises ValueError: for a checkpoint of other data or settings; the error names what differs.
        """
        names = [name for name in {**self._own, **state} if self._own.get(name) != state.get(name)]
        if not names:
            return
        of_data = [name for name in names if name.startswith("data[")]
        others = [f"{name} ({state.get(name)} there, {self._own.get(name)} here)" for name in names if name not in of_data]
        raise ValueError(
            f"expected a checkpoint of this fit, got one that differs in {', '.join(of_data + others)}; use the data and "
            "settings of the checkpoint, name another file, or remove this one to start anew"
        )

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Load nothing, since a fingerprint is only compared.

        :param state: returned by :meth:`state_dict`.
        """


def digest(value: Any) -> str:
    """Compute the SHA-256 digest of nested mappings and sequences of tensors, numbers and strings.

    >>> digest({"x": torch.zeros(2)}) == digest({"x": torch.zeros(3)})
    False
    """
    found = hashlib.sha256()
    _update(found, value)
    return found.hexdigest()


def _update(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"tensor {value.dtype} {list(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}".encode())
        for key, entry in value.items():
            _update(found, key)
            _update(found, entry)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        found.update(f"sequence {len(value)}".encode())
        for entry in value:
            _update(found, entry)
    else:
        found.update(f"{type(value).__name__} {value!r}".encode())


def _structure(name: str, part: Any) -> dict[str, str]:
    """Classes, settings and frozen parameters of a model or guide and of all its modules."""
    if not isinstance(part, nn.Module):
        return {name: part.__qualname__ if inspect.isroutine(part) else type(part).__qualname__}
    found: dict[str, str] = {}
    for path, module in part.named_modules(prefix=name):
        found |= _settings(path, module)
        if frozen := sorted(name for name, value in module.named_parameters(recurse=False) if not value.requires_grad):
            found[f"{path}.frozen"] = repr(frozen)
    return found


def _settings(name: str, part: Any) -> dict[str, str]:
    """Class of an object, and its public attributes that are numbers, strings, or sequences of them."""
    found = {name: type(part).__qualname__}
    if isinstance(part, nn.Module | ELBO):
        for attribute, value in vars(part).items():
            if not attribute.startswith("_") and attribute not in _CHANGES_IN_FITS and _is_simple(value):
                found[f"{name}.{attribute}"] = repr(value)
    return found


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_simple(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)


def _arguments(optim: Any) -> dict[str, Any]:
    """Arguments of a Pyro optimiser that are numbers or strings."""
    args = optim.pt_optim_args
    return {name: value for name, value in args.items() if _is_simple(value)} if isinstance(args, Mapping) else {}
