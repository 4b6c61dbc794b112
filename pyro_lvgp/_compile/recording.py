"""Tensor operations recorded through the Python that calls for them, so that they can be compiled without it."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.overrides import TorchFunctionMode

from pyro_lvgp._utils.seeding import seeded

_ASSUMED: ContextVar[list[Tensor] | None] = ContextVar("assumed", default=None)
_DRAWS_LIKE: dict[Any, Any] = {
    torch.ops.aten.randn_like.default: torch.ops.aten.randn.default,
    torch.ops.aten.rand_like.default: torch.ops.aten.rand.default,
}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
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


class Recording(NamedTuple):
    """Operations as graphs, of which one makes the random numbers that the other takes.

    :param draws: returns random numbers, in the order in which they were drawn.
    :param graph: maps inputs and draws to the outputs, and to whether all that was assumed holds.
    :param is_random: whether the second graph draws them itself, since some depend on its inputs.
    """

    draws: GraphModule
    graph: GraphModule
    is_random: bool


def record(function: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]) -> Recording:
    """The operations of a function, as graphs of its inputs.

    Tensors that are not inputs belong to the graph: it sees what is written into them, but not others put in their place.  The
    state of random numbers is left alone.

    :param function: takes no arguments, and returns tensors.
    :param inputs: tensors that the function reads wherever it finds them.
    :raises ValueError: if what the function does depends on the values of tensors, other than by :func:`assume`.

    >>> x = torch.tensor(2.0)
    >>> draws, graph, _ = record(lambda: (x + torch.rand(()) if assume(x > 0.0) else -x,), [x])
    >>> y, holds = graph(torch.tensor(3.0), *draws())
    >>> bool(3.0 <= y < 4.0), holds
    (True, tensor(True))
    >>> graph(torch.tensor(-3.0), *draws())[1]
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
            recorded = _operations(wrapped, inputs)
    finally:
        _ASSUMED.reset(token)
    draws = _take_out_draws(recorded.graph)
    graph = GraphModule(recorded, recorded.graph)
    return Recording(GraphModule({}, draws), graph, any(_is_random(node) for node in graph.graph.nodes))


def record_pure(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    """The operations of a function of tensors that draws nothing, as a graph to be differentiated, or compiled.

    :param function: maps the inputs to tensors.
    :param inputs: tensors of the shapes that the graph is for; one that is here twice stands for two.
    :raises ValueError: if what the function does depends on the values of tensors, or it reads a parameter.

    >>> record_pure(lambda x: (x.exp(),), [torch.zeros(2)])(torch.ones(2))
    (tensor([2.7183, 2.7183]),)
    """
    recorded = _operations(function, [x.detach().requires_grad_(x.requires_grad) for x in inputs])
    for node in recorded.graph.find_nodes(op="get_attr"):
        if (fixed := getattr(recorded, node.target)).requires_grad:
            raise ValueError(
                f"expected a function of its arguments, got one that reads a parameter of shape {list(fixed.shape)}, which "
                "would have no gradient; pass it as an argument, or return it from statistics(...)"
            )
    return GraphModule(recorded, recorded.graph)


def _operations(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """A module of the tensor operations of a function; it bears notes on its tracing that compilers trip over."""
    try:
        with pyro.validation_enabled(False):  # which looks at values
            recorded: Any = make_fx(function)(*inputs)
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise _refusal() from error
    _locate_fixed_masks(recorded)
    for node in recorded.graph.nodes:
        if _depends_on_values(node):
            raise _refusal(str(node.target))
    return recorded


def _locate_fixed_masks(recorded: Any) -> None:
    """Index by places instead of masks that are the same at all calls, such as that of the entries below a diagonal.

    What such a mask takes has one shape, which compilers cannot know.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    places: dict[tuple[Node, Node], Node] = {}
    fixed = _made_of_nothing(recorded.graph, random=False)
    for node in recorded.graph.nodes:
        for mask in filter(_is_mask, _indices(node)):
            if mask in fixed:
                places[node, mask] = graph.call_function(torch.nonzero, (copies[mask],))
        if node in fixed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(places.values()))
    for (node, mask), found in zip(places, GraphModule({}, graph)(), strict=True):
        columns: list[Node] = []
        for column in found.unbind(-1):
            name = f"_places_{len(list(recorded.buffers()))}"
            recorded.register_buffer(name, column.contiguous())
            with recorded.graph.inserting_before(node):
                columns.append(recorded.graph.get_attr(name))
        indices = [part for index in _indices(node) for part in (columns if index is mask else [index])]
        node.args = (node.args[0], indices, *node.args[2:])


def _made_of_nothing(graph: Graph, *, random: bool = True) -> set[Node]:
    """Operations that depend on no tensor from outside, with or without those that draw."""
    made: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and made.issuperset(node.all_input_nodes) and (random or not _is_random(node)):
            made.add(node)
    return made


def _take_out_draws(graph: Graph) -> Graph:
    """Random operations as a graph of their own; their results become further inputs of this one.

    If some depend on the values of inputs, all stay, in their order.
    """
    for node in graph.nodes:
        if node.target in _DRAWS_LIKE and node.meta["tensor_meta"].memory_format is torch.contiguous_format:
            described = node.meta["tensor_meta"]
            node.target, node.args = _DRAWS_LIKE[node.target], (list(described.shape),)
            node.kwargs = {"dtype": described.dtype, "device": node.meta["val"].device}
    fixed = _made_of_nothing(graph)
    random = [node for node in graph.nodes if _is_random(node)]
    random = random if fixed.issuperset(random) else []
    needed = set(random)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    draws = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed:
            copies[node] = draws.node_copy(node, copies.__getitem__)
    draws.output(tuple(copies[node] for node in random))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for number, node in enumerate(random):
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.placeholder(f"draw_{number}"))
    for node in reversed(graph.nodes):
        if node in needed and not node.users:
            graph.erase_node(node)
    return draws


class _ItemsAsTensors(TorchFunctionMode):
    """``x.item()`` is x, so that numbers taken out of tensors only to be added up can be recorded too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _indices(node: Node) -> Any:
    """What an operation indexes by: for each dimension a node or None."""
    return node.args[1] if node.target in _INDEXING else ()


def _is_mask(index: Node | None) -> bool:
    return index is not None and "tensor_meta" in index.meta and index.meta["tensor_meta"].dtype == torch.bool


def _depends_on_values(node: Node) -> bool:
    """Whether the shape of a recorded operation, or its being recorded, hangs on values."""
    if node.target is torch.ops.aten.index.Tensor:
        return any(map(_is_mask, _indices(node)))
    return bool(_VALUE_TAGS & set(getattr(node.target, "tags", ())))


def _refusal(operation: str = "a number or a boolean taken out of a tensor") -> ValueError:
    return ValueError(
        f"expected operations that do not depend on the values of tensors, got {operation}: write torch.where or a mask, or "
        "pyro_lvgp._compile.recording.assume(condition) to take a short cut; or do not compile"
    )
