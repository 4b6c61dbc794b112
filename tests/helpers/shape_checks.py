"""Checks of argument and result shapes by jaxtyping and beartype, at a fraction of their usual cost."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

_check_at_each_call = jaxtyping.jaxtyped
_KEYWORDS = object()  # between the arguments by position and those by name


def install(package: str) -> None:
    """Check each function of a package at its first call with each combination of shapes and types of the arguments.

    A check depends on nothing else, as long as the shapes of a result follow from the shapes of the arguments, and takes
    about 50 microseconds, as long as several tensor operations.

    :param package: name of the package, before it is imported.
    """
    jaxtyping.jaxtyped = _check_new_shapes
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _check_new_shapes(function: Any = None, *, typechecker: Any) -> Any:
    if function is None:  # called with a checker alone, as a decorator with arguments
        return functools.partial(_check_new_shapes, typechecker=typechecker)
    if dataclasses.is_dataclass(function) and not hasattr(function.__init__, "__wrapped__"):
        function.__init__ = _check_new_shapes(function.__init__, typechecker=typechecker)
        return function
    if not inspect.isfunction(function):
        return _check_at_each_call(function, typechecker=typechecker)
    passed: set[Any] = set()

    @functools.cache
    def checked() -> Callable[..., Any]:  # takes a millisecond
        with warnings.catch_warnings():  # of old annotations, which code that records warnings would find
            warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
            return _check_at_each_call(function, typechecker=typechecker)

    config = jaxtyping.config

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        shapes = _shapes((*args, _KEYWORDS, *kwargs, *kwargs.values()) if kwargs else args)
        if shapes in passed:
            return function(*args, **kwargs)
        result = checked()(*args, **kwargs)
        passed.add(shapes)
        return result

    return call


def _shapes(values: Any) -> tuple[Any, ...]:
    """Describe what checks depend on: shapes and dtypes of tensors, strings, and the types of other values."""
    shapes = []
    for value in values:  # in a loop without calls for most values, because steps of fits have hundreds
        kind = type(value)
        describe = _describers.get(kind, _new_kind)
        shapes.append(kind if describe is None else describe(value))
    return tuple(shapes)


def _new_kind(value: Any) -> Any:
    kind = type(value)
    describe = next((describe for parent, describe in _PARENTS.items() if issubclass(kind, parent)), None)
    _describers[kind] = describe
    return kind if describe is None else describe(value)


_PARENTS: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: lambda tensor: (type(tensor), tensor.dtype, tensor.shape),
    str: lambda text: text,
    tuple: lambda items: (type(items), _shapes(items)),
    list: lambda items: (type(items), _shapes(items)),
    dict: lambda items: (type(items), *items, _shapes(items.values())),
}
_describers: dict[type, Callable[[Any], Any] | None] = {}
