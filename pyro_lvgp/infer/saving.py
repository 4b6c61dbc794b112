"""Files of fitted models and guides, which hold no code and, but for what a guide stores, no data."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.files import replace_file
from pyro_lvgp._utils.interrupts import uninterrupted
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_device
from pyro_lvgp.infer._descriptions import SIMPLE, Describer, decode, stored
from pyro_lvgp.infer.protocols import HasArgumentShapes, HasExampleArguments, HasExampleData

__all__ = ["Saved", "load", "save"]

_FORMAT, _HEADER = 1, "pyro_lvgp"
_PARTS = ("model", "guide")
_EXTRA = "_extra_state"  # name in a state_dict
_CHANGES = frozenset({"training"})  # attributes that calls change


@dataclass(frozen=True)
class Saved:
    """Model and guide of a file, which ``model, guide = load(path)`` unpacks.

    :param model: the model.
    :param guide: its guide; None if the file has none.
    :param extras: what was saved besides.

    >>> model, guide = Saved("model", "guide", {"mean": 0.5})
    >>> model, guide
    ('model', 'guide')
    """

    model: Any
    guide: Any
    extras: dict[str, Any]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.guide))


@names_types
@pyro_lock
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    guide: nn.Module | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Write a model, and its guide after a fit, to a file from which :func:`load` makes both again.

    The file is in the format of safetensors: parameters and buffers, and the classes and arguments of model, kernel,
    likelihood, guide and encoders as text.  It has no data of the fit, but for those that a guide or a model stores
    (:class:`~pyro_lvgp.guides.RandomFeatureGuide` and :class:`~pyro_lvgp.models.LinearGPVAE`).  Initial values of latents,
    which only new guides need, are left out.  Labels of columns are kept if they are strings or numbers.  Before anything is
    written, model and guide are made again, and compared.

    :param path: name of the file; a file of that name is replaced once the new one is complete.
    :param model: a model of this package.
    :param guide: its guide, after a call.
    :param extras: numbers, strings, tensors, and lists and mappings of them that belong to the fit, such as the means and
        standard deviations by which the data were standardised; :attr:`Saved.extras` has them.
    :raises TypeError: for extras of another kind, for a module that is not of this package, or an argument that is neither a
        number, a string, a tensor, a layer of ``torch.nn`` nor a module of this package, such as a function.
    :raises ValueError: for a copy, for a guide before its first call, or for a part that was changed after its construction
        in a way that the file cannot hold, such as a prior at a parameter.
    :raises OSError: if the file cannot be written; an old file then is as it was.

    >>> import tempfile
    >>> from pyro_lvgp import BayesianGPLVM, MeanFieldGuide
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide = MeanFieldGuide(model)
    >>> sites = guide(Y)  # fit it here
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", model, guide)
    ...     again, its_guide = load(f"{folder}/model.safetensors")
    >>> torch.equal(its_guide.locs.X, guide.locs.X)
    True
    """
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        raise ValueError("expected a guide after a call, got one without parameters; fit it, or call it once on the data")
    tensors: dict[str, Tensor] = {}
    writer = Describer(tensors, model)
    header: dict[str, Any] = {
        "format": _FORMAT,
        "versions": {name: version(name) for name in ("pyro-lvgp", "torch", "pyro-ppl")},
        "model": writer.describe(model, "model"),
        "guide": None if guide is None else writer.describe(guide, "guide"),
        "arguments": guide.argument_shapes if isinstance(guide, HasArgumentShapes) else None,
        "extras": writer.encode(_checked(extras or {}), "extras"),
    }
    for name, part in (("model", model), ("guide", guide)):
        if part is not None:
            tensors |= {f"{name}.{key}": stored(value) for key, value in _flat_state(part).items()}
            header[f"{name}_dtype"] = str(_dtype_of(part)).removeprefix("torch.")
            header[f"{name}_frozen"] = sorted(key for key, value in part.named_parameters() if not value.requires_grad)
    twins = _construct(header, tensors)
    for name, part, twin in zip(_PARTS, (model, guide), twins, strict=True):
        if part is not None:
            header[f"{name}_attributes"] = _changed_attributes(name, part, twin)
    text = json.dumps(header)
    _write(Path(path), to_bytes(tensors, {_HEADER: text, "digest": _digest(text, tensors)}))


@names_types
@pyro_lock
def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Saved:
    """Make the model and the guide of a file that :func:`save` wrote.

    No code of the file runs: classes are those of this package and layers of ``torch.nn``, by name.

    :param path: name of the file.
    :param device: device of the results.
    :raises ValueError: for a damaged file, one of another kind, or one with other classes.
    :raises OSError: if the file cannot be read.
    """
    check_device(device)
    header, tensors = _read(Path(path))
    saved = _construct(header, tensors)
    for name, part in zip(_PARTS, saved, strict=True):
        if part is not None:
            for place, values in header[f"{name}_attributes"].items():
                for attribute, value in values.items():
                    setattr(part.get_submodule(place), attribute, tuple(value) if isinstance(value, list) else value)
            part.to(device)
    return saved


def _construct(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Saved:
    """Make model and guide, with the parameters and buffers of a file."""
    with seeded(0):
        extras = decode(header.get("extras", {}), tensors, None)
        model = decode({"module": header["model"]}, tensors, None)
        _load_state("model", model, header, tensors)
        if header["guide"] is None:
            return Saved(model, None, extras)
        guide = decode({"module": header["guide"]}, tensors, model).to(_dtype(header, "guide"))
        # Guides make parameters of sites, and draw from the model, at the first call.
        if (arguments := _example_arguments(model, header.get("arguments"))) is not None:
            with torch.no_grad():
                guide(*arguments)
        elif _own_state(guide).keys() != _without_extra(_state("guide", tensors)).keys():
            raise TypeError(
                f"expected a guide that has encoders alone, or a model with example_data() or example_arguments(shapes), got "
                f"{type(model).__name__}; store the state_dict() of both"
            )
        _load_state("guide", guide, header, tensors)
    return Saved(model, guide, extras)


def _example_arguments(model: Any, shapes: Any) -> tuple[Any, ...] | None:
    """Return arguments for a call without data of the user; None if the model makes none."""
    if isinstance(model, HasExampleData):
        return model.example_data()
    return model.example_arguments(shapes) if shapes and isinstance(model, HasExampleArguments) else None


def _checked(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return extras; raise for values whose code the file cannot hold."""
    wrong = sorted({type(leaf).__name__ for leaf in tree_leaves(dict(extras)) if not isinstance(leaf, (*SIMPLE, Tensor))})
    if wrong:
        raise TypeError(f"expected numbers, strings and tensors as extras, got {wrong}; use torch.as_tensor(...) for arrays")
    return dict(extras)


def _state(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters and buffers of the model or of the guide."""
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


def _flat_state(part: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and the tensors of what a module stores besides."""
    extra = {key: values for key, values in part.state_dict().items() if key.endswith(_EXTRA)}
    return _own_state(part) | {f"{key}.{entry}": value for key, values in extra.items() for entry, value in values.items()}


def _own_state(part: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers."""
    return _without_extra(part.state_dict())


def _without_extra(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if _EXTRA not in key.split(".")}


def _load_state(name: str, part: nn.Module, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Load parameters and buffers; raise if they are others than those of the module."""
    part.to(_dtype(header, name))
    flat, own = _state(name, tensors), _own_state(part)
    state: dict[str, Any] = dict(_without_extra(flat))
    different = {key for key in {*own, *state} if key not in own or key not in state or own[key].shape != state[key].shape}
    if different:
        raise ValueError(
            f"expected a {name} whose parameters are those that its constructor makes, got others for {sorted(different)}: "
            "priors or parameters were set after construction; store state_dict(), and make it anew by your own code"
        )
    for key in part.state_dict().keys() - own.keys():
        extra = f"{key}."
        state[key] = {entry.removeprefix(extra): value for entry, value in flat.items() if entry.startswith(extra)}
    part.load_state_dict(state)
    for key, parameter in part.named_parameters():
        parameter.requires_grad_(key not in header[f"{name}_frozen"])


def _changed_attributes(name: str, part: nn.Module, twin: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from those of the twin, by submodule; raise for other differences."""
    twins, changed = dict(twin.named_modules()), {}
    for place, module in part.named_modules():
        other = twins.pop(place, None)
        if other is None and not module.state_dict():  # a container that a guide makes at its first call
            continue
        if other is None or not _is_alike(module, other):
            raise ValueError(
                f"expected a {name} as its constructor makes it, got another {type(module).__name__} at {place or name!r}: "
                "parts or priors were set after construction; pass them to the constructor, or store state_dict()"
            )
        its = _settings(other)
        if settings := {key: value for key, value in _settings(module).items() if value != its.get(key, ...)}:
            changed[place] = settings
    if twins:
        raise ValueError(f"expected a {name} with the parts that its constructor makes, got one without {sorted(twins)}")
    return changed


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are numbers, strings or tuples of them."""
    of_pyro = {name for name in vars(module) if name.startswith("_pyro")}
    return {k: v for k, v in vars(module).items() if _is_simple(v) and k not in _CHANGES | of_pyro}


def _is_simple(value: Any) -> bool:
    return isinstance(value, SIMPLE) or (type(value) is tuple and all(isinstance(each, SIMPLE) for each in value))


def _is_alike(module: nn.Module, other: nn.Module) -> bool:
    """Return whether class, names of priors and tensors that are no parameters are the same."""
    return type(other) is type(module) and _priors(other) == _priors(module) and _has_equal_tensors(module, other)


def _has_equal_tensors(module: nn.Module, other: nn.Module) -> bool:
    """Return whether attributes that are tensors, but no parameters or buffers, are the same; copies have these attributes."""
    states: Any = (module.__getstate__(), other.__getstate__())
    own, its = ({name: value for name, value in state.items() if isinstance(value, Tensor)} for state in states)
    return own.keys() == its.keys() and all(torch.equal(stored(value), stored(its[name])) for name, value in own.items())


def _priors(module: Any) -> set[str]:
    return set(module._pyro_samples) if isinstance(module, PyroModule) else set()


def _dtype(header: Mapping[str, Any], name: str) -> torch.dtype:
    return getattr(torch, header[f"{name}_dtype"])


def _dtype_of(part: nn.Module) -> torch.dtype:
    """Return the dtype of all floating-point parameters and buffers."""
    dtypes = {value.dtype for value in _own_state(part).values() if value.is_floating_point()}
    if len(dtypes) > 1:
        raise ValueError(f"expected parameters of one dtype, got {sorted(map(str, dtypes))}; convert the model by .to(dtype)")
    return dtypes.pop() if dtypes else torch.get_default_dtype()


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 digest of the header and the tensors."""
    hashed = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        hashed.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        hashed.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _write(path: Path, content: bytes) -> None:
    with uninterrupted():
        try:
            replace_file(path, lambda unfinished: unfinished.write_bytes(content))
        except OSError as error:
            raise OSError(
                f"expected to write to {path}, got an error ({error}); an old file of that name is as it was: make room on "
                "the disk, or name a file in another folder"
            ) from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read header and tensors; raise for a file that is damaged or of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except SafetensorError as error:
        raise ValueError(
            f"expected a file that save(...) wrote, got {path}, which cannot be read ({error}); take a copy of the file"
        ) from error
    if _HEADER not in metadata:
        raise ValueError(f"expected a file that save(...) wrote, got {path}, with tensors alone; use load_state_dict(...)")
    text = metadata[_HEADER]
    if metadata.get("digest") != _digest(text, tensors):
        raise ValueError(f"expected {path} as save(...) wrote it, got a file that was changed or damaged; take a copy of it")
    header = json.loads(text)
    if header["format"] != _FORMAT:
        raise ValueError(
            f"expected a file of format {_FORMAT}, got {header['format']}, of pyro-lvgp {header['versions']['pyro-lvgp']}; "
            "use that version, or save the model again"
        )
    return header, tensors
