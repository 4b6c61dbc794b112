"""Removal of operations from recorded graphs: repeated ones, those of constants, and copies without gradients."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from pyro_lvgp._compile.identities import unchanged_argument
from pyro_lvgp._compile.recording import is_random

__all__ = ["simplified"]

_MAX_ENTRIES = 100_000  # of a constant that is stored
_OF_SHAPE = {  # operations whose results depend on the shape of their first argument alone
    getattr(torch.ops.aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
}


@torch.no_grad()
def simplified(module: GraphModule) -> GraphModule:
    """Copy a graph without needless operations; its results are the same to the last bit.

    - The result of an operation with the arguments of an earlier one is that of the earlier one.
    - Operations of constants, and those of which the result depends on the shape of a tensor alone, are computed once, here.
    - ``detach`` is left out: a recorded graph holds its gradients, and has none of its own.  So are operations that return an
      argument as it is (:func:`~pyro_lvgp._compile.identities.unchanged_argument`).
    - Operations whose results are used nowhere are left out.

    Tensors that are written in place and results of the graph, which may be written by those who get them, stay tensors of
    their own.  Operations that draw random numbers, and those of other libraries, are left as they are.

    :param module: tensor operations, recorded by :func:`~pyro_lvgp._compile.recording.record_pure`.

    >>> from pyro_lvgp._compile.recording import record_pure
    >>> graph = record_pure(lambda x: (x.exp() + x.exp() * torch.ones(2).cos(),), [torch.zeros(2)])
    >>> [node.name for node in simplified(graph).graph.nodes]
    ['arg0_1', 'exp', '_computed_0', 'mul', 'add', 'output']
    """
    written = _storages(argument for node in module.graph.nodes for argument in _written(node))
    own = written | _storages(module.graph.output_node().all_input_nodes)
    attributes = module.graph.find_nodes(op="get_attr")
    graph = Graph()
    copies: dict[Node, Node] = {}
    values: dict[Node, Tensor] = {}  # of constants
    constants: dict[int, Node] = {}  # of the stored tensors, by their identity
    computed: dict[Hashable, Node] = {}
    stored: dict[str, Any] = {str(node.target): getattr(module, str(node.target)) for node in attributes}

    def copy_of(node: Node) -> Node:
        if node not in copies:  # a constant that an operation takes which stays
            value = values[node]
            if id(value) not in constants:
                name = f"_computed_{len(stored)}"
                stored[name], constants[id(value)] = value, graph.create_node("get_attr", name)
            copies[node] = constants[id(value)]
        return copies[node]

    for node in module.graph.nodes:
        is_removable = node not in own and _is_pure(node) and written.isdisjoint(node.all_input_nodes)
        if is_removable and (source := _source(node, values)) is not None:
            if source in values:
                values[node] = values[source]
            else:
                copies[node] = copies[source]
        elif is_removable and (value := _constant(module, node, values)) is not None:
            values[node] = value
        elif is_removable and (first := computed.get(key := _key(node, copy_of))) is not None:
            copies[node] = first
        else:
            copies[node] = graph.node_copy(node, copy_of)
            if is_removable:
                computed[key] = copies[node]
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or _is_pure(node)):
            graph.erase_node(node)
    return GraphModule(stored, graph)


def _source(node: Node, values: dict[Node, Tensor]) -> Node | None:
    """Return the argument that an operation returns, as it is or without gradients."""
    return node.all_input_nodes[0] if node.target is torch.ops.aten.detach.default else unchanged_argument(node, values)


def _is_pure(node: Node) -> bool:
    """Whether an operation of PyTorch depends on nothing but its arguments, and changes none of them."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return not node.target._schema.is_mutable and not is_random(node)


def _written(node: Node) -> list[Node]:
    """Arguments that an operation writes in place."""
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    by_name = dict(zip((each.name for each in schema.arguments), node.args, strict=False)) | node.kwargs
    found = [by_name.get(each.name) for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in found if isinstance(each, Node)]


def _storages(nodes: Iterable[Node]) -> set[Node]:
    """Nodes whose results may share memory with those of given ones."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [each for each in node.users if _is_view(each)]
            waiting += node.all_input_nodes if _is_view(node) else []
    return found


def _is_view(node: Node) -> bool:
    """Whether a result may be a view of an argument, or is one."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    return any(each.alias_info is not None for each in node.target._schema.returns)


def _constant(module: GraphModule, node: Node, values: dict[Node, Tensor]) -> Tensor | None:
    """Compute an operation of constants; None if it depends on other tensors, or its result is large or no tensor."""
    if node.target is torch.ops.aten.lift_fresh_copy.default:  # of a number that the recorded function made a tensor
        (source,) = node.all_input_nodes
        if source.op == "get_attr":
            return getattr(module, str(source.target)).clone()
    described, target = node.meta.get("val"), cast(Callable[..., Tensor], node.target)
    if not isinstance(described, Tensor) or described.numel() > _MAX_ENTRIES:
        return None
    if target in _OF_SHAPE or (target is torch.ops.aten.pow.Tensor_Scalar and node.args[1] == 0):
        shape = node.all_input_nodes[0].meta["val"]
        like = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=shape.device)
        return target(like, *node.args[1:], **node.kwargs)
    if not all(each in values for each in node.all_input_nodes):
        return None
    return target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))


def _key(node: Node, copy_of: Callable[[Node], Node]) -> Hashable:
    """Describe an operation and its arguments, with their types, since 1 == 1.0."""

    def frozen(value: Any) -> Hashable:
        if isinstance(value, list | tuple):
            return tuple(map(frozen, value))
        if isinstance(value, dict):
            return tuple((name, frozen(each)) for name, each in sorted(value.items()))
        return copy_of(value) if isinstance(value, Node) else (type(value), value)

    return node.target, frozen(node.args), frozen(node.kwargs)
