"""Errors of calls with arguments of other types than those that the function declares."""

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
from torch import Tensor

__all__ = ["check_types", "checks_types", "explain_types", "names_types", "types_checked"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MANY = (Collection, Iterable, Sequence)
_LONGEST = 80  # of a printed argument


def names_types(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that errors of arguments of other types name the argument, the type and the value.

    Arguments are looked at after an error alone, so that nothing that works is refused.

    :param function: a function with type annotations.

    >>> @names_types
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half("one")
    Traceback (most recent call last):
        ...
    TypeError: expected number to be float, got 'one' of type str
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explain_types(error, function, args, kwargs)
            raise

    return call


def checks_types(constructor: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a constructor that keeps its arguments, so that those of other types are refused at once.

    What the constructor says itself comes first.

    :param constructor: a function with type annotations.

    >>> @checks_types
    ... def hold(number: float) -> float:
    ...     return number
    >>> hold([1.0])
    Traceback (most recent call last):
        ...
    TypeError: expected number to be float, got [1.0] of type list
    """

    @wraps(constructor)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with types_checked(constructor, args, kwargs):
            return constructor(*args, **kwargs)

    return call


@contextmanager
def types_checked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raise a ``TypeError`` if an argument of the call in this context is not of its declared type.

    :param function: the function that is called.
    :param args: its arguments by position.
    :param kwargs: its arguments by name.
    """
    try:
        yield
    except Exception as error:
        explain_types(error, function, args, kwargs)
        raise
    check_types(function, args, kwargs)


def explain_types(error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise a ``TypeError`` from an error of others than this package, if an argument is not of its declared type.

    :param error: what a call of the function raised.
    :param function: the function.
    :param args: its arguments by position.
    :param kwargs: its arguments by name.
    """
    if isinstance(error, TypeError | ValueError) and "expected" in str(error):
        return
    if text := _first_wrong(function, args, kwargs, strict=True):
        raise TypeError(text) from error


def check_types(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise a ``TypeError`` if an argument is not of its declared type.

    :param function: the function.
    :param args: its arguments by position.
    :param kwargs: its arguments by name.
    """
    if text := _first_wrong(function, args, kwargs, strict=False):
        raise TypeError(text)


def _first_wrong(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, strict: bool) -> str:
    """Describe the first argument that is not of its declared type, or return an empty text.

    Not strictly, a class is a function, and every text may be a literal, since constructors say which there are.
    """
    for name, value, hint in _declared(function, args, kwargs):
        if not _is_of(value, hint, strict):
            advice = "; use int(...)" if hint is int and isinstance(value, float) else ""
            declared = inspect.formatannotation(hint)
            return f"expected {name} to be {declared}, got {_short(value)} of type {type(value).__name__}{advice}"
    return ""


def _declared(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and declared type of each argument; nothing if they do not fit the signature."""
    try:
        signature, hints = _signature(function)
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return
    for name, value in given.items():
        if name in hints and signature.parameters[name].kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            yield name, value, hints[name]


@cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # names that are imported for type checkers alone
        annotations = inspect.get_annotations(inspect.unwrap(function))
        hints = {name: hint for name, hint in annotations.items() if not isinstance(hint, str)}
    return inspect.signature(function), hints


def _is_of(value: Any, hint: Any, strict: bool) -> bool:
    """Return whether a value may be of a type; True for types that are not distinguished."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, part, strict) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint) if strict else isinstance(value, tuple(map(type, typing.get_args(hint))))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool | np.bool_)
    if hasattr(hint, "array_type"):  # of jaxtyping, which says more than the type
        return isinstance(value, hint.array_type)
    return _is_instance(value, hint, origin, strict)


def _is_instance(value: Any, hint: Any, origin: Any, strict: bool) -> bool:
    """Return whether a value may be of a type that is neither a union, nor a number, nor a tensor."""
    if origin is type:
        return isinstance(value, type) and all(
            isinstance(part, type) and issubclass(value, part) for part in typing.get_args(hint)
        )
    kind: Any = type(None) if hint is None else origin or hint
    if kind is Callable:
        return callable(value) and not (strict and isinstance(value, type))  # a class in place of an instance
    is_static = getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)
    if not isinstance(kind, type) or is_static:
        return True
    if not isinstance(value, kind) or (isinstance(value, str) and kind in _MANY):  # a text is not many texts
        return False
    return all(_is_of(part, hint_of_parts, strict) for part, hint_of_parts in _parts(value, kind, typing.get_args(hint)))


def _parts(value: Any, kind: Any, hints: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a list, sequence or mapping with their declared type."""
    if kind is Mapping and hints:
        yield from ((part, hints[1]) for part in value.values())
    elif kind in (Sequence, list) and hints:
        yield from ((part, hints[0]) for part in value)


def _short(value: Any) -> str:
    text = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
