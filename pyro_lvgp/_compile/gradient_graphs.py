"""A recorded function and its gradient as two graphs, of which the first keeps for the second what took long."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

_EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.exp.default,
}


class GradientGraphs(NamedTuple):
    """Both graphs.

    :param forward: maps inputs to outputs and to what is kept.
    :param backward: maps inputs, what was kept, and whatever else the gradients are made of, to them.
    :param kept: operations whose results are kept.
    """

    forward: GraphModule
    backward: GraphModule
    kept: Sequence[Node]


def split_gradient(joint: GraphModule, num_inputs: int, num_outputs: int) -> GradientGraphs:
    """A graph of both, split: products of matrices and exponentials are kept, all else is computed again where needed.

    :param joint: maps inputs, and whatever else the gradients are made of, to outputs and gradients.
    :param num_inputs: number of inputs, which come first.
    :param num_outputs: number of outputs, which come first and are made of inputs alone.

    >>> from pyro_lvgp._compile.recording import record_pure
    >>> A, x, of_y = torch.randn(2, 2), torch.randn(2, 1), torch.ones(2, 1)
    >>> joint = record_pure(lambda A, x, of_y: [(A @ x).exp(), A.mT @ ((A @ x).exp() * of_y)], [A, x, of_y])
    >>> forward, backward, kept = split_gradient(joint, num_inputs=2, num_outputs=1)
    >>> y, kept_y = forward(A, x)
    >>> torch.equal(backward(A, x, kept_y, of_y)[0], A.mT @ y)
    True
    """
    nodes = list(joint.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    inputs, others = given[:num_inputs], given[num_inputs:]
    (results,) = nodes[-1].args
    late = set(others)
    for node in nodes[:-1]:
        if late.intersection(node.all_input_nodes):
            late.add(node)
    needed = {source for node in late for source in node.all_input_nodes} | set(results[num_outputs:])
    kept = _nearest_expensive(needed - late, nodes)
    early = [node for node in nodes[num_inputs:-1] if node not in late]
    rest = [node for node in nodes[:-1] if node not in {*given, *kept}]
    forward = _graph(joint, inputs, early, [*results[:num_outputs], *kept])
    backward = _graph(joint, [*inputs, *kept, *others], rest, results[num_outputs:])
    return GradientGraphs(forward, backward, kept)


def _nearest_expensive(targets: Iterable[Node], nodes: Sequence[Node]) -> list[Node]:
    """What is expensive and leads to the targets through nothing else that is, in the order of the nodes."""
    pending, found, seen = list(targets), set(), set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in _EXPENSIVE:
            found.add(node)
        else:
            pending.extend(node.all_input_nodes)
    return [node for node in nodes if node in found]


def _graph(module: GraphModule, given: Sequence[Node], operations: Sequence[Node], results: Sequence[Any]) -> GraphModule:
    """A graph from results of some operations to those of others."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in operations:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code()
    return GraphModule(module, graph)
