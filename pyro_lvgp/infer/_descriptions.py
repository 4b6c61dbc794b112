"""Descriptions of modules as text: class and arguments of the constructor, with tensors apart."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.construction import construction_of

__all__ = ["SIMPLE", "Describer", "decode", "stored"]

SIMPLE = (bool, int, float, str, type(None))
_PACKAGE = __name__.partition(".")[0]


class Describer:
    """Descriptions of objects as text, and the tensors among their arguments.

    :param tensors: receives the tensors.
    :param model: the model, which its guide refers to.
    """

    def __init__(self, tensors: dict[str, Tensor], model: nn.Module):
        self._tensors, self._model = tensors, model

    def describe(self, module: nn.Module, place: str) -> dict[str, Any]:
        """Describe a module by its class and the arguments of its constructor."""
        if type(module) is nn.Linear or type(module) is PyroModule[nn.Linear]:
            sizes = {"in_features": module.in_features, "out_features": module.out_features}
            return {"layer": "Linear", "args": [], "kwargs": sizes | {"bias": module.bias is not None}}
        construction, package = construction_of(module), f"{_PACKAGE}."
        if construction is None and isinstance(type(module), AbstractModuleMeta):
            raise ValueError(
                f"expected {place} as its constructor made it, got a copied or unpickled {type(module).__name__}, whose "
                "arguments are not known; save the original, or store state_dict()"
            )
        if construction is None or not construction.cls.__module__.startswith(package):
            raise TypeError(
                f"expected modules of {_PACKAGE} or layers of torch.nn, got a {type(module).__name__} as {place}, whose code "
                "the file cannot hold; store its state_dict(), and make it anew by your own code"
            )
        cls, args, kwargs = construction
        return {
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "args": [self.encode(value, f"{place}[{i}]") for i, value in enumerate(args)],
            "kwargs": {name: self.encode(value, f"{place}.{name}") for name, value in kwargs.items()},
        }

    def encode(self, value: Any, place: str) -> Any:
        """Return a description of an argument.

        :param value: a number, a string, a tensor, a module of this package, or a list or mapping of these.
        :param place: name of the argument.
        """
        if isinstance(value, SIMPLE):
            return value
        if value is self._model:
            return {"model": True}
        if isinstance(value, nn.Module):
            return {"module": self.describe(value, place)}
        if isinstance(value, Tensor):
            self._tensors[f"arguments.{place}"] = stored(value)
            return {"tensor": f"arguments.{place}"}
        if is_dataclass(value) and type(value).__module__.startswith(f"{_PACKAGE}."):
            given = {field.name: getattr(value, field.name) for field in fields(value)}
            return {
                "dataclass": f"{type(value).__module__}.{type(value).__qualname__}",
                "fields": {name: self.encode(x, f"{place}.{name}") for name, x in given.items()},
            }
        if isinstance(value, list | tuple):
            return {
                "sequence": [self.encode(x, f"{place}[{i}]") for i, x in enumerate(value)],
                "tuple": isinstance(value, tuple),
            }
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {"mapping": {name: self.encode(x, f"{place}.{name}") for name, x in value.items()}}
        if names := [name for name, layer in vars(nn).items() if layer is value and isinstance(layer, type)]:
            return {"layer class": names[0]}
        raise TypeError(
            f"expected numbers, strings, tensors and modules as arguments of a module to save, got {type(value).__name__} as "
            f"{place}; store state_dict(), and make model and guide anew by your own code"
        )


def decode(value: Any, tensors: Mapping[str, Tensor], model: Any) -> Any:
    """Make the object of a description.

    :param value: the description, made by :class:`Describer`.
    :param tensors: the tensors among the arguments.
    :param model: the model that a guide refers to.
    :raises ValueError: for a class that is neither of this package nor a layer of ``torch.nn``.
    """
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "model":
        return model
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "sequence":
        items = [decode(x, tensors, model) for x in content]
        return tuple(items) if value["tuple"] else items
    if kind == "mapping":
        return {name: decode(x, tensors, model) for name, x in content.items()}
    if kind == "layer class":
        return _layer(content)
    if kind == "dataclass":
        return _class_of(content)(**{name: decode(x, tensors, model) for name, x in value["fields"].items()})
    cls = _layer(content["layer"]) if "layer" in content else _class_of(content["class"])
    args = [decode(x, tensors, model) for x in content["args"]]
    return cls(*args, **{name: decode(x, tensors, model) for name, x in content["kwargs"].items()})


def _layer(name: str) -> Callable[..., nn.Module]:
    cls = vars(nn).get(name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"expected a layer of torch.nn, got {name!r}; the file is not one that save(...) wrote")
    return cls


def _class_of(name: str) -> Callable[..., Any]:
    """Return the class of this package by its full name."""
    module, _, attribute = name.rpartition(".")
    cls = vars(import_module(module)).get(attribute) if module.startswith(f"{_PACKAGE}.") else None
    if not (isinstance(cls, AbstractModuleMeta) or (isinstance(cls, type) and is_dataclass(cls))):
        raise ValueError(
            f"expected classes of models, kernels, likelihoods, guides, networks and their arguments of {_PACKAGE}, got "
            f"{name!r}; the file is one of another version, or not one that save(...) wrote"
        )
    return cls


def stored(value: Tensor) -> Tensor:
    """Copy a tensor to memory of its own on the CPU."""
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)
