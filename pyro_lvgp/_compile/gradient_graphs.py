"""Forward and backward graphs of a recorded function, with saved tensors for the results of expensive operations."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["GradientGraphs", "split_gradient"]

_EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.exp.default,
}


class GradientGraphs(NamedTuple):
    """Forward and backward graphs of a function.

    :param forward: maps inputs to outputs and saved tensors.
    :param backward: maps inputs, saved tensors and the further inputs of the gradients to the gradients.
    :param saved: operations whose results are saved.
    """

    forward: GraphModule
    backward: GraphModule
    saved: Sequence[Node]


def split_gradient(joint: GraphModule, num_inputs: int, num_outputs: int) -> GradientGraphs:
    """Split a joint graph of outputs and gradients into a forward and a backward graph.

    The forward graph saves matrix products and exponentials; the backward graph recomputes all other operations.

    :param joint: maps inputs, and the further inputs of the gradients, to outputs and gradients.
    :param num_inputs: number of inputs, which come first.
    :param num_outputs: number of outputs, which come first and depend on the inputs alone.

    >>> from pyro_lvgp._compile.recording import record_pure
    >>> A, x, y_bar = torch.randn(2, 2), torch.randn(2, 1), torch.ones(2, 1)
    >>> joint = record_pure(lambda A, x, y_bar: [(A @ x).exp(), A.mT @ ((A @ x).exp() * y_bar)], [A, x, y_bar])
    >>> forward, backward, _ = split_gradient(joint, num_inputs=2, num_outputs=1)
    >>> y, saved_y = forward(A, x)
    >>> torch.equal(backward(A, x, saved_y, y_bar)[0], A.mT @ y)
    True
    """
    nodes = list(joint.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs, further = placeholders[:num_inputs], placeholders[num_inputs:]
    (results,) = nodes[-1].args
    dependent = set(further)  # nodes that depend on the further inputs
    for node in nodes[:-1]:
        if dependent.intersection(node.all_input_nodes):
            dependent.add(node)
    needed = {source for node in dependent for source in node.all_input_nodes} | set(results[num_outputs:])
    saved = _nearest_expensive(needed - dependent, nodes)
    forward_operations = [node for node in nodes[num_inputs:-1] if node not in dependent]
    backward_operations = [node for node in nodes[:-1] if node not in {*placeholders, *saved}]
    forward = _graph(joint, inputs, forward_operations, [*results[:num_outputs], *saved])
    backward = _graph(joint, [*inputs, *saved, *further], backward_operations, results[num_outputs:])
    return GradientGraphs(forward, backward, saved)


def _nearest_expensive(targets: Iterable[Node], nodes: Sequence[Node]) -> list[Node]:
    """Expensive operations on a path to the targets without another expensive operation, in the order of the nodes."""
    pending, expensive, visited = list(targets), set(), set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.target in _EXPENSIVE:
            expensive.add(node)
        else:
            pending.extend(node.all_input_nodes)
    return [node for node in nodes if node in expensive]


def _graph(module: GraphModule, given: Sequence[Node], operations: Sequence[Node], results: Sequence[Any]) -> GraphModule:
    """Copy operations to a new graph, from given nodes to results."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in operations:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code()
    return GraphModule(module, graph)
