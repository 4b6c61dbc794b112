"""Representations of modules by their constructor's arguments and the values of their parameters."""

import inspect
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch import Tensor, nn
from torch.distributions import Independent, transform_to

from pyro_lvgp._utils.construction import construction_of

__all__ = ["Represented", "display_name", "format_tensor"]

_LONGEST = 60  # of another object
_MOST_NUMBERS = 8
_SIMPLE = (bool, int, float, str)


class Represented:
    """Base class of objects that are printed as the call that makes them, with the present values of parameters.

    Arguments that have their default are left out, parts that the constructor makes are shown, and tensors of more than eight
    numbers are shown by their shape.  Notebooks show a table.  Objects whose constructor's call is not recorded, such as
    copies, are printed as usual.
    """

    def __repr__(self) -> str:
        arguments = _arguments(self)
        if arguments is None:
            return super().__repr__()
        return f"{display_name(self)}({_joined(arguments)})"

    def _repr_html_(self) -> str:
        arguments = _arguments(self)
        if arguments is None:
            return f"<pre>{escape(super().__repr__())}</pre>"
        rows = list(arguments)
        if isinstance(self, nn.Module):
            learned = sum(part.numel() for part in self.parameters() if part.requires_grad)
            rows.append(("learned numbers", f"{learned:,}"))
        cells = "".join(f"<tr><td>{escape(name)}</td><td><code>{escape(text)}</code></td></tr>" for name, text in rows)
        return f"<b>{escape(display_name(self))}</b><table>{cells}</table>"


def format_tensor(value: Tensor) -> str:
    """Format up to eight numbers with four digits, and larger tensors by their shape.

    :param value: a tensor.

    >>> import torch
    >>> format_tensor(torch.tensor(0.25)), format_tensor(torch.ones(2)), format_tensor(torch.ones(3, 4))
    ('0.25', '[1, 1]', 'Tensor[3, 4]')
    """
    if value.dim() > 1 and value.shape[1:].numel() == 1:
        value = value.flatten()
    if value.dim() > 1 or value.numel() > _MOST_NUMBERS:
        return f"Tensor[{', '.join(map(str, value.shape))}]"
    numbers = [f"{number:.4g}" for number in value.detach().flatten().tolist()]
    return f"[{', '.join(numbers)}]" if value.dim() else numbers[0]


def _arguments(instance: Any) -> list[tuple[str, str]] | None:
    """Return names and texts of the arguments of an object; the name is empty for one of any number by position."""
    construction = construction_of(instance)
    if construction is None:
        return None
    constructor: Any = construction.cls.__init__  # type: ignore[misc]
    signature = inspect.signature(constructor)
    bound = signature.bind(instance, *construction.args, **construction.kwargs).arguments
    found: list[tuple[str, str]] = []
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            found += [("", _text(value)) for value in bound.get(name, ())]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found += [(key, _text(value)) for key, value in bound.get(name, {}).items()]
        elif (text := _text_of_argument(instance, name, bound.get(name, parameter.default), parameter.default)) is not None:
            found.append((name, text))
    return found


def _text_of_argument(instance: Any, name: str, given: Any, default: Any) -> str | None:
    """Return the text of an argument: its present value as parameter or part if there is one; None for the default."""
    if name in (samples := getattr(instance, "_pyro_samples", {})):
        prior = samples[name]
        while isinstance(prior, Independent):
            prior = prior.base_dist
        return f"PyroSample({display_name(prior)})"
    if name in (params := getattr(instance, "_pyro_params", {})):
        constraint, _ = params[name]
        return format_tensor(transform_to(constraint)(getattr(instance, f"{name}_unconstrained")))
    if name == "model":
        return f"{display_name(given)}(…)"
    part = instance._modules.get(name) if isinstance(instance, nn.Module) else None
    if part is not None and construction_of(part) is not None:
        return _text(part)
    return None if given is default or (isinstance(given, _SIMPLE) and given == default) else _text(given)


def _text(value: Any) -> str:
    """Return a short text of a value."""
    if isinstance(value, Tensor):
        return format_tensor(value)
    if (arguments := _arguments(value) if isinstance(value, nn.Module) else None) is not None:
        return f"{display_name(value)}({_joined(arguments)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple) and len(value) <= _MOST_NUMBERS:
        texts = ", ".join(map(_text, value))
        return f"[{texts}]" if isinstance(value, list) else f"({texts}{',' * (len(value) == 1)})"
    if isinstance(value, type):
        return value.__name__
    if inspect.isroutine(value):
        return display_name(value)
    text = repr(value)
    return text if isinstance(value, _SIMPLE) or len(text) <= _LONGEST else f"{display_name(value)}(…)"


def display_name(value: Any) -> str:
    """Return the name of the class that a person wrote, which Pyro may have replaced, or of a function; without handlers.

    :param value: an object, a function, or one of these in Pyro's handlers.

    >>> from pyro import poutine
    >>> display_name(nn.Linear(1, 1)), display_name(poutine.scale(nn.Linear(1, 1), 0.5))
    ('Linear', 'Linear')
    """
    value = inspect.unwrap(value)
    if inspect.isroutine(value):
        return value.__name__
    construction = construction_of(value) if isinstance(value, nn.Module) else None
    return construction.cls.__name__ if construction else type(value).__name__.removeprefix("Pyro")


def _joined(arguments: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={text}" if name else text for name, text in arguments)
