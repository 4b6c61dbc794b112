"""How the bound of a fit is run: eagerly, as a graph without Python, or compiled."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal, get_args

from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_lvgp.infer.elbo.compiled import CompiledELBO
from pyro_lvgp.infer.optim import LazyAdam

__all__ = ["Compile", "make_bound", "uses_graph"]

Compile = bool | Literal["auto", "inductor", "torchscript"]

_LEAST_STEPS = 1000  # a recording takes as long as some 200 eager steps
_MAX_OPERATIONS = 20_000  # of a step, so that a recording takes seconds
_STATIC = ("pyro_lvgp", "pyro", "torch", "builtins", "weakref")  # packages without Python state that changes between steps


def uses_graph(compile: Compile, num_steps: int, parts: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Return whether the steps of a fit run as a graph.

    Those of ``"auto"`` do in fits of 1000 steps or more on a CPU, if all parts are of this library, of Pyro or of PyTorch: a
    graph would not see Python state that other code changes between steps.

    :param compile: the argument of a fit.
    :param num_steps: number of steps.
    :param parts: model, guide, bound, optimiser and callbacks.
    :param tensors: data.
    :raises ValueError: for an unknown setting, or one other than ``"auto"`` and False with a ``LazyAdam``, whose sparse
        gradients no graph has.

    >>> import math
    >>> uses_graph("auto", 1000, [nn.Linear(1, 1)], []), uses_graph("auto", 1000, [math.sqrt], [])
    (True, False)
    """
    if compile not in get_args(get_args(Compile)[1]) and not isinstance(compile, bool):
        raise ValueError(f'expected compile to be True, False, "auto", "torchscript" or "inductor", got {compile!r}')
    is_lazy = any(isinstance(part, LazyAdam) for part in parts)
    if compile != "auto":
        if compile and is_lazy:
            raise ValueError(f'expected compile="auto" or False with a LazyAdam, got {compile!r}; or take a JointAdam')
        return bool(compile)
    used = [*tensors, *(x for part in parts if isinstance(part, nn.Module) for x in (*part.parameters(), *part.buffers()))]
    on_cpu = all(x.device.type == "cpu" for x in used)
    has_blocks = any(isinstance(part, list | tuple) for part in parts)
    are_static = all(_is_static(part) for part in parts if part is not None)
    return num_steps >= _LEAST_STEPS and on_cpu and not has_blocks and not is_lazy and are_static


def make_bound(bound: ELBO, compile: Compile) -> ELBO:
    """Return a bound whose steps run as a graph.

    :param bound: the bound.
    :param compile: a setting under which :func:`uses_graph` is true.

    >>> from pyro.infer import Trace_ELBO
    >>> make_bound(Trace_ELBO(), True).backend, make_bound(Trace_ELBO(), "auto").backend
    ('inductor', 'torchscript')
    """
    if compile == "auto":
        return CompiledELBO(bound, backend="torchscript", max_operations=_MAX_OPERATIONS)
    return CompiledELBO(bound, backend="inductor" if compile is True else str(compile))


def _is_static(part: Any) -> bool:
    """Return whether a part, and all that it calls, is of a package without Python state that changes between steps."""
    return all(_package(item) in _STATIC for item in _called_by(part))


def _called_by(part: Any) -> Iterator[Any]:
    """Yield a part, its modules, and the functions and callable objects among their attributes."""
    for module in part.modules() if isinstance(part, nn.Module) else [part]:
        yield module
        with suppress(TypeError):  # of an object without attributes
            for value in vars(module).values():
                items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else (value,)
                yield from filter(callable, items)


def _package(item: Any) -> str:
    """Return the package of a function, or of the class of an object."""
    while isinstance(item, partial):
        item = item.func
    # Functions and methods tell their own module, other objects that of their class.
    named = item if isinstance(item, type | FunctionType | BuiltinFunctionType | MethodType) else type(item)
    return (named.__module__ or "").partition(".")[0]
