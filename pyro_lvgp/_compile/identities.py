"""Operations of recorded graphs whose result is one of their arguments to the last bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

__all__ = ["unchanged_argument"]

_aten = torch.ops.aten
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar}
_QUOTIENTS = {_aten.div.Tensor, _aten.div.Scalar, _aten.pow.Tensor_Scalar}
_DIFFERENCES = {_aten.sub.Tensor, _aten.sub.Scalar}
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default}
_INVOLUTIONS = {_aten.neg.default, _aten.t.default, _aten.transpose.int}


def unchanged_argument(node: Node, values: Mapping[Node, Tensor]) -> Node | None:
    """Return the argument that an operation returns as it is; None if there is none.

    Such are products with 1, quotients by 1, powers of 1, differences from 0, reshapes to the same shape, and an operation
    that undoes another.  Sums with 0 are not, since −0 + 0 = 0.

    :param node: an operation of a recorded graph.
    :param values: constants of the graph.

    >>> from pyro_lvgp._compile.recording import record_pure
    >>> graph = record_pure(lambda x: (x.exp() * 1.0,), [torch.zeros(2)])
    >>> unchanged_argument(list(graph.graph.nodes)[2], {})
    exp
    """
    source: Any = None
    if node.target in _PRODUCTS:
        first, second = node.args[:2]
        source = first if _is(second, 1, values) else second if _is(first, 1, values) else None
    elif node.target in _QUOTIENTS and _is(node.args[1], 1, values):
        source = node.args[0]
    elif node.target in _DIFFERENCES and _is(node.args[1], 0, values):
        source = node.args[0]
    elif node.target in _RESHAPES:
        source = node.args[0]
    elif node.target in _INVOLUTIONS and isinstance(inner := node.args[0], Node):
        source = inner.args[0] if (inner.target, inner.args[1:]) == (node.target, node.args[1:]) else None
    return source if isinstance(source, Node) and _layout(source) == _layout(node) is not None else None


def _is(argument: Any, number: int, values: Mapping[Node, Tensor]) -> bool:
    """Whether an argument is a number, or a constant of which all entries are."""
    if isinstance(argument, Node):
        return argument in values and bool((values[argument] == number).all())
    return argument == number


def _layout(node: Node) -> Any:
    """Return dtype, shape and strides of a result, which the rounding of later operations may depend on."""
    described = node.meta.get("val")
    return (described.dtype, described.shape, described.stride()) if isinstance(described, Tensor) else None
