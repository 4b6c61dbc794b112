"""Recording of the tensor operations of a Python function as a graph."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_lvgp._utils.control_flow import record_conditions
from pyro_lvgp._utils.seeding import seeded

__all__ = ["CountOperations", "Recording", "is_random", "is_traced", "record", "record_pure"]

_RANDOM_LIKE: dict[Any, Any] = {
    torch.ops.aten.randn_like.default: torch.ops.aten.randn.default,
    torch.ops.aten.rand_like.default: torch.ops.aten.rand.default,
}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CountOperations(TorchDispatchMode):
    """Count the tensor operations in a context, those of backward passes included.

    >>> with CountOperations() as operations:
    ...     y = torch.ones(2).exp()
    >>> operations.total
    2
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += 1
        return func(*args, **(kwargs or {}))


class Recording(NamedTuple):
    """Recorded operations, as a graph that draws the random inputs, and a deterministic graph.

    :param random_inputs: returns the random inputs, in the order of the draws.
    :param graph: maps inputs and random inputs to the outputs, and to whether all conditions of
        :func:`~pyro_lvgp._utils.control_flow.holds` that were true during the recording are true, and of a guarded recording
        all Python booleans made of tensors what they were; false, too, where an operation of linear algebra fails.
    :param is_random: whether ``graph`` draws random numbers itself, because some draws depend on its inputs.
    """

    random_inputs: GraphModule
    graph: GraphModule
    is_random: bool

    @property
    def draws(self) -> bool:
        """Whether the recorded function draws random numbers."""
        return self.is_random or bool(self.random_inputs.graph.output_node().args[0])


def record(function: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor], *, guarded: bool = False) -> Recording:
    """Record the operations of a function as graphs of its inputs.

    Tensors that are not inputs become constants of the graph: in-place changes of these tensors affect the graph, but an
    attribute that is set to another tensor does not.  The global random state does not change.

    :param function: function without arguments that returns tensors.
    :param inputs: tensors on which the result of the function depends.
    :param guarded: record Python booleans made of tensors as conditions, and Pyro's validation, if enabled, with them.
    :raises ValueError: if the operations depend on the values of tensors, other than by
        :func:`~pyro_lvgp._utils.control_flow.holds`, or by booleans of a guarded recording.

    >>> from pyro_lvgp._utils.control_flow import holds
    >>> x = torch.tensor(2.0)
    >>> random_inputs, graph, _ = record(lambda: (x + torch.rand(()) if holds(x > 0.0) else -x,), [x])
    >>> y, is_valid = graph(torch.tensor(3.0), *random_inputs())
    >>> bool(3.0 <= y < 4.0), is_valid
    (True, tensor(True))
    >>> graph(torch.tensor(-3.0), *random_inputs())[1]
    tensor(False)
    """
    conditions: list[Tensor] = []

    def evaluate(condition: Tensor) -> bool:
        if is_true := _value(condition):
            conditions.append(condition)
        return is_true

    def guard(condition: Tensor) -> bool:
        is_true, holds = _value(condition), condition.detach().reshape(()).bool()
        conditions.append(holds if is_true else ~holds)
        return is_true

    def wrapped(*_: Tensor) -> tuple[Tensor | None, ...]:
        with _ItemsAsTensors(), _BooleansBy(guard) if guarded else nullcontext():
            outputs = function()
        return *outputs, torch.stack(conditions).all() if conditions else torch.ones((), dtype=torch.bool)

    with record_conditions(evaluate), seeded(0):
        recorded = _operations(wrapped, inputs, validates=guarded)
    _errors_as_conditions(recorded.graph)
    random_inputs = _split_random(recorded.graph)
    graph = GraphModule(recorded, recorded.graph)
    return Recording(GraphModule({}, random_inputs), graph, any(is_random(node) for node in graph.graph.nodes))


def record_pure(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    """Record the operations of a deterministic function of tensors as a graph.

    :param function: maps the inputs to tensors.
    :param inputs: tensors of the shapes of the graph's inputs; a repeated tensor is two inputs.
    :raises ValueError: if the operations depend on the values of tensors, or the function reads a parameter.

    >>> record_pure(lambda x: (x.exp(),), [torch.zeros(2)])(torch.ones(2))
    (tensor([2.7183, 2.7183]),)
    """
    recorded = _operations(function, [x.detach().requires_grad_(x.requires_grad) for x in inputs])
    for node in recorded.graph.find_nodes(op="get_attr"):
        if (constant := getattr(recorded, node.target)).requires_grad:
            raise ValueError(
                f"expected a function of its arguments, got one that reads a parameter of shape {list(constant.shape)}, which "
                "would have no gradient; pass the parameter as an argument, or return it from statistics(...)"
            )
    return GraphModule(recorded, recorded.graph)


def _value(condition: Tensor) -> bool:
    """Return the value of a condition, which is not recorded."""
    with disable_proxy_modes_tracing():
        return bool(condition.detach().reshape(()).tolist())


def is_traced() -> bool:
    """Whether tensor operations are being recorded, which code that runs without Python must not be part of.

    >>> is_traced(), record(lambda: (torch.tensor(is_traced()),), []).graph()[0].item()
    (False, True)
    """
    return get_proxy_mode() is not None


def _operations(function: Callable[..., Any], inputs: Sequence[Tensor], *, validates: bool = False) -> Any:
    """Trace the tensor operations of a function; the module has attributes of the tracer that compilers do not accept."""

    def described(*tensors: Tensor) -> Any:
        # The tracer describes each result by a fake tensor: without a mode in the context, it makes a mode for each.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            return function(*tensors)

    try:
        # Validation depends on values.
        with nullcontext() if validates else pyro.validation_enabled(False):
            recorded: Any = make_fx(described)(*inputs)
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise _refusal() from error
    _index_by_constant_masks(recorded)
    for node in recorded.graph.nodes:
        if _depends_on_values(node):
            raise _refusal(str(node.target))
    return recorded


def _errors_as_conditions(graph: Graph) -> None:
    """Make a graph invalid, by its last result, where an operation of linear algebra fails, instead of raising an error."""
    output: Any = graph.output_node()
    *results, is_valid = output.args[0]
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
        with graph.inserting_before(output):
            succeeds = graph.call_function(torch.ops.aten.eq.Scalar, (node.args[0], 0))
            all_succeed = graph.call_function(torch.ops.aten.all.default, (succeeds,))
            is_valid = graph.call_function(torch.ops.aten.logical_and.default, (is_valid, all_succeed))
        graph.erase_node(node)
    output.args = ((*results, is_valid),)


def _index_by_constant_masks(recorded: Any) -> None:
    """Replace constant masks, such as that of the entries below a diagonal, by the indices of their true entries.

    The shape of the result of indexing by a mask depends on the values of the mask, so that compilers do not support it.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    indices: dict[tuple[Node, Node], Node] = {}
    constants = _independent_of_inputs(recorded.graph, random=False)
    for node in recorded.graph.nodes:
        for mask in filter(_is_mask, _indices(node)):
            if mask in constants:
                indices[node, mask] = graph.call_function(torch.nonzero, (copies[mask],))
        if node in constants:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(indices.values()))
    for (node, mask), index_rows in zip(indices, GraphModule({}, graph)(), strict=True):
        columns: list[Node] = []
        for column in index_rows.unbind(-1):
            name = f"_indices_{len(list(recorded.buffers()))}"
            recorded.register_buffer(name, column.contiguous())
            with recorded.graph.inserting_before(node):
                columns.append(recorded.graph.get_attr(name))
        replaced = [part for index in _indices(node) for part in (columns if index is mask else [index])]
        node.args = (node.args[0], replaced, *node.args[2:])


def _independent_of_inputs(graph: Graph, *, random: bool = True) -> set[Node]:
    """Operations that depend neither on inputs nor on constants, with or without random operations."""
    independent: set[Node] = set()
    for node in graph.nodes:
        is_eligible = node.op == "call_function" and (random or not is_random(node))
        if is_eligible and independent.issuperset(node.all_input_nodes):
            independent.add(node)
    return independent


def _split_random(graph: Graph) -> Graph:
    """Move random operations to a graph of their own, whose results become further inputs of the given graph.

    If a random operation depends on inputs, no operation is moved, so that the order of the draws does not change.
    """
    _replace_random_like(graph)
    random = [node for node in graph.nodes if is_random(node)]
    if not _independent_of_inputs(graph).issuperset(random):
        random = []
    needed = _with_sources(graph, random)
    moved = _copy_operations(graph, needed, random)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for number, node in enumerate(random):
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.placeholder(f"random_input_{number}"))
    for node in reversed(graph.nodes):
        if node in needed and not node.users:
            graph.erase_node(node)
    return moved


def _replace_random_like(graph: Graph) -> None:
    """Replace ``randn_like(x)``, which depends on x, by ``randn(shape)``."""
    for node in graph.nodes:
        if node.target in _RANDOM_LIKE and node.meta["tensor_meta"].memory_format is torch.contiguous_format:
            described = node.meta["tensor_meta"]
            node.target, node.args = _RANDOM_LIKE[node.target], (list(described.shape),)
            node.kwargs = {"dtype": described.dtype, "device": node.meta["val"].device}


def _with_sources(graph: Graph, nodes: Sequence[Node]) -> set[Node]:
    """Nodes and all operations that they depend on."""
    needed = set(nodes)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _copy_operations(graph: Graph, operations: set[Node], results: Sequence[Node]) -> Graph:
    """Copy operations, which depend on no others, to a new graph without inputs."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in operations:
            copies[node] = copy.node_copy(node, copies.__getitem__)
    copy.output(tuple(copies[node] for node in results))
    return copy


class _ItemsAsTensors(TorchFunctionMode):
    """Replace ``x.item()`` by x in double precision, like Python's numbers, so that sums of such numbers can be recorded."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item:
            x = args[0].detach()
            return x.double() if x.is_floating_point() else x
        return func(*args, **(kwargs or {}))


class _BooleansBy(TorchFunctionMode):
    """Evaluate Python booleans made of tensors by a function."""

    def __init__(self, evaluate: Callable[[Tensor], bool]):
        super().__init__()
        self._evaluate = evaluate

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._evaluate(args[0]) if func is Tensor.__bool__ else func(*args, **(kwargs or {}))


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers.

    :param node: an operation of a graph.
    """
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _indices(node: Node) -> Any:
    """Indices of an indexing operation: for each dimension a node or None."""
    return node.args[1] if node.target in _INDEXING else ()


def _is_mask(index: Node | None) -> bool:
    return index is not None and "tensor_meta" in index.meta and index.meta["tensor_meta"].dtype == torch.bool


def _depends_on_values(node: Node) -> bool:
    """Whether the shape of a result, or a result that is a Python number, depends on the values of tensors."""
    if node.target is torch.ops.aten.index.Tensor:
        return any(map(_is_mask, _indices(node)))
    return bool(_VALUE_TAGS & set(getattr(node.target, "tags", ())))


def _refusal(operation: str = "a Python number or boolean made from a tensor") -> ValueError:
    return ValueError(
        f"expected operations that do not depend on the values of tensors, got {operation}; use torch.where or a mask, or "
        "pyro_lvgp.infer.holds(condition) for a specialised branch; or do not compile"
    )
