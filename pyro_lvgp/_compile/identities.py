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
    source = _argument(node, values)
    return source if isinstance(source, Node) and _layout(source) == _layout(node) is not None else None


def _argument(node: Node, values: Mapping[Node, Tensor]) -> Any:
    """Return the argument that has the entries of the result; None if there is none."""
    args: Any = node.args
    if node.target in _PRODUCTS and _is(args[0], 1, values):
        return args[1]
    if node.target in _PRODUCTS | _QUOTIENTS:
        return args[0] if _is(args[1], 1, values) else None
    if node.target in _DIFFERENCES:
        return args[0] if _is(args[1], 0, values) else None
    if node.target in _INVOLUTIONS and isinstance(args[0], Node):
        return args[0].args[0] if (args[0].target, args[0].args[1:]) == (node.target, args[1:]) else None
    return args[0] if node.target in _RESHAPES else None


def _is(argument: Any, number: int, values: Mapping[Node, Tensor]) -> bool:
    """Whether an argument is a number, or a constant of which all entries are."""
    if isinstance(argument, Node):
        return argument in values and bool((values[argument] == number).all())
    return argument == number


def _layout(node: Node) -> Any:
    """Return dtype, shape and strides of a result, which the rounding of later operations may depend on."""
    described = node.meta.get("val")
    return (described.dtype, described.shape, described.stride()) if isinstance(described, Tensor) else None
