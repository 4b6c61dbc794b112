"""Tensor operations recorded through the Python that calls for them, so that they can be compiled without it."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode

from pyro_lvgp.seeding import seeded

_ASSUMED: ContextVar[list[Tensor] | None] = ContextVar("assumed", default=None)
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def assume(condition: Tensor) -> bool:
    """Whether a condition on tensors holds, to take a short cut if it does.

    A recording that takes the short cut checks the condition each time it is run; one that does not take it checks nothing, so
    that the way around must be right in either case.

    :param condition: one boolean.

    >>> x = torch.tensor([1.0, 2.0])
    >>> "nothing to mask" if assume(~torch.isnan(x).any()) else "masked"
    'nothing to mask'
    """
    assumed = _ASSUMED.get()
    if assumed is None:
        return bool(condition)
    with disable_proxy_modes_tracing():
        holds = bool(condition.detach())
    if holds:
        assumed.append(condition)
    return holds


def is_recording() -> bool:
    """Whether operations are being recorded: shapes must not depend on the values of tensors then."""
    return _ASSUMED.get() is not None


def record(function: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]) -> GraphModule:
    """The operations of a function, as a graph of its inputs and of whether all that it assumed holds.

    Random operations are recorded as such.  Tensors that are not inputs belong to the graph: it sees what is written into
    them, but not others put in their place.  The state of random numbers is left alone.

    :param function: takes no arguments, and returns tensors.
    :param inputs: tensors that the function reads wherever it finds them.
    :returns: a module that maps inputs to what the function returns and a boolean.
    :raises ValueError: if what the function does depends on the values of tensors, other than by :func:`assume`.

    >>> x = torch.tensor(2.0)
    >>> graph = record(lambda: (x.square() if assume(x > 0.0) else -x,), [x])
    >>> graph(torch.tensor(3.0))
    (tensor(9.), tensor(True))
    >>> graph(torch.tensor(-3.0))[1]
    tensor(False)
    """
    assumed: list[Tensor] = []

    def wrapped(*_: Tensor) -> tuple[Tensor | None, ...]:
        with _ItemsAsTensors():
            outputs = function()
        return *outputs, torch.stack(assumed).all() if assumed else torch.ones((), dtype=torch.bool)

    token = _ASSUMED.set(assumed)
    try:
        with seeded(0):
            recorded: Any = make_fx(wrapped)(*inputs)
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise _refusal() from error
    finally:
        _ASSUMED.reset(token)
    for node in recorded.graph.nodes:
        if _depends_on_values(node):
            raise _refusal(str(node.target))
    # A fresh module: the recorded one bears notes on its tracing that compilers trip over.
    return GraphModule(recorded, recorded.graph)


class _ItemsAsTensors(TorchFunctionMode):
    """``x.item()`` is x, so that numbers taken out of tensors only to be added up can be recorded too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _depends_on_values(node: Node) -> bool:
    """Whether the shape of a recorded operation, or its being recorded, hangs on values."""
    if node.target is torch.ops.aten.index.Tensor:
        indices: Any = node.args[1]
        return any(index is not None and index.meta["tensor_meta"].dtype == torch.bool for index in indices)
    return bool(_VALUE_TAGS & set(getattr(node.target, "tags", ())))


def _refusal(operation: str = "a number or a boolean taken out of a tensor") -> ValueError:
    return ValueError(
        f"expected operations that do not depend on the values of tensors, got {operation}: write torch.where or a mask, or "
        "pyro_lvgp.recording.assume(condition) to take a short cut; or do not compile"
    )
