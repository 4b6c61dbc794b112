"""Differentiable recursions of which one step is compiled, for any number of steps."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, compress, count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pyro_lvgp._compile.compilation import Compiled, compile_graph
from pyro_lvgp._compile.gradient_graphs import split_gradient
from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp._utils.control_flow import is_recording

__all__ = ["CompiledLoop"]


class CompiledLoop:
    r"""Differentiable recursion whose step and vector-Jacobian product are compiled once, for any number of steps.

    .. math:: h_k = f(\theta, h_{k-1}, x_k, \epsilon_k), \qquad k = 1 \dots K

    Both graphs are recorded for each signature of the arguments: their shapes, dtypes and devices, and all values that are not
    tensors.  The first call with a signature runs eagerly, and the graphs are compiled when a later call needs them.  In a
    graph that is recorded around the loop (:class:`~pyro_lvgp.infer.CompiledELBO`), the loop is one operation and its
    gradient another.  All arguments but the noise have gradients.  The forward pass saves the states, and of each step the
    matrix products and exponentials; the backward pass recomputes all other operations.

    :param step: f, which maps (shared, state, inputs, noise) to the next state.  Each is a pytree of tensors; ``step`` must
        not read parameters that are not among its arguments, nor draw random numbers.

    >>> loop = CompiledLoop(lambda decay, state, inputs, noise: decay * state + inputs)
    >>> loop(torch.tensor(0.5), torch.tensor(1.0), torch.tensor([0.0, 1.0, 2.0]), [(), (), ()])
    tensor(2.6250)
    """

    def __init__(self, step: Callable[[Any, Any, Any, Any], Any]):
        self.step = step
        self._graphs: dict[Hashable, _LoopGraphs] = {}

    def __call__(self, shared: Any, state: Any, inputs: Any, noise: Sequence[Any]) -> Any:
        """Run the recursion.

        :param shared: θ, the same at all steps; leaves that are not tensors are constants of the graphs.
        :param state: h_0, a pytree of tensors.
        :param inputs: x, a pytree of at least one tensor, with steps along the first dimension.
        :param noise: ε_k of each step, pytrees of tensors without gradients.
        :returns: h_K.
        """
        trees = (shared, state, _step_of(inputs, 0), noise[0])
        leaves, structures = zip(*map(tree_flatten, trees), strict=True)
        signature = (*structures, *(_signature(leaf) for part in leaves for leaf in part))
        if signature not in self._graphs:
            if not is_recording():
                self._graphs[signature] = self._record(leaves, structures)
            for k, noise_k in enumerate(noise):
                state = self.step(shared, state, _step_of(inputs, k), noise_k)
            return state
        shared_tensors = [leaf for leaf in leaves[0] if isinstance(leaf, Tensor)]
        tensors = [*shared_tensors, *leaves[1], *tree_flatten(inputs)[0], *tree_flatten(list(noise))[0]]
        last = _Loop.apply(self._graphs[signature], torch.is_grad_enabled(), *tensors)
        return tree_unflatten(last, structures[1])

    def _record(self, leaves: Sequence[Sequence[Any]], structures: Sequence[Any]) -> "_LoopGraphs":
        """Record the step as a function of lists of tensors."""
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves[0]]
        constants = [None if tensor else leaf for leaf, tensor in zip(leaves[0], is_tensor, strict=True)]

        def step(shared: Sequence[Tensor], *others: Sequence[Tensor]) -> list[Tensor]:
            tensors = iter(shared)
            filled = [next(tensors) if tensor else leaf for leaf, tensor in zip(constants, is_tensor, strict=True)]
            trees = (tree_unflatten(part, spec) for part, spec in zip((filled, *others), structures, strict=True))
            return tree_flatten(self.step(*trees))[0]

        return _LoopGraphs(step, list(compress(leaves[0], is_tensor)), *leaves[1:])


class _LoopGraphs:
    """Graphs of a step and of its vector-Jacobian product, compiled when they are first needed.

    :param step: maps lists of shared tensors, state, inputs and noise to the next state.
    :param shared: examples of the shared tensors; those that require a gradient and affect the state get a gradient.
    :param state: examples of the state.
    :param inputs: examples of the inputs of a step.
    :param noise: examples of the noise of a step.
    """

    def __init__(
        self,
        step: Callable[..., list[Tensor]],
        shared: Sequence[Tensor],
        state: Sequence[Tensor],
        inputs: Sequence[Tensor],
        noise: Sequence[Tensor],
    ):
        self._function, self.num_state, self._num_inputs, self._num_noise = step, len(state), len(inputs), len(noise)
        self._trained = self._need_gradients(shared, state, inputs, noise)
        arguments = [*shared, *state, *inputs, *noise]
        with torch.no_grad():
            self._step = _LazyGraph(record_pure(self._flat_step, arguments))
            gradients = [*state, *compress(shared, self._trained)]
            joint = record_pure(self._step_and_gradients, [*arguments, *gradients])
        forward, backward, saved = split_gradient(joint, len(arguments), self.num_state)
        self._step_and_save, self._step_back = _LazyGraph(forward), _LazyGraph(backward)
        self._saved = [node.meta["val"] for node in saved]
        # The compiler caches code on the disk by the text of a graph, which must determine the shapes of the operations below.
        described = [(list(x.shape), x.dtype) for x in self._saved]
        self.name = f"{next(_NUMBERS)}: saves {described}, trains {self._trained}"
        _LOOPS[self.name] = self

    def forward(self, tensors: Sequence[Tensor], save: bool) -> list[Tensor]:
        """All K + 1 states, stacked for each tensor, and the stacked saved tensors of the steps if ``save``."""
        shared, state, inputs, noise = self._split(_detached(tensors))
        step = self._step_and_save if save else self._step
        states, saved = [state], []
        for k in range(len(inputs[0])):
            results = step(*shared, *states[-1], *_step_of(inputs, k), *self._noise_of(noise, k))
            next_state, saved_k = _parts(results, self.num_state)
            states.append(next_state)
            saved.append(saved_k)
        return [torch.stack(rows) for steps in (states, saved) for rows in zip(*steps, strict=True)]

    def backward(self, tensors: Sequence[Tensor], saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the trained shared tensors, the first state and the inputs, given the gradients of the last state.

        :param tensors: arguments of the loop.
        :param saved: returned by :meth:`forward`.
        :param gradients: gradients of the last state.
        """
        shared, _, inputs, noise = self._split(_detached(tensors))
        totals: Sequence[Tensor] = [torch.zeros_like(x) for x in compress(shared, self._trained)]
        input_gradients = []
        for k in reversed(range(len(inputs[0]))):
            state, saved_k = _parts(_step_of(saved, k), self.num_state)
            arguments = [*shared, *state, *_step_of(inputs, k), *self._noise_of(noise, k)]
            results = self._step_back(*arguments, *saved_k, *gradients, *totals)
            gradients, input_gradients_k, totals = _parts(results, self.num_state, self._num_inputs)
            input_gradients.append(input_gradients_k)
        stacked = [torch.stack(rows[::-1]) for rows in zip(*input_gradients, strict=True)]
        return [x.clone(memory_format=torch.contiguous_format) for x in (*totals, *gradients)] + stacked

    def empty_forward(self, tensors: Sequence[Tensor], save: bool) -> list[Tensor]:
        """Empty tensors of the shapes that :meth:`forward` returns."""
        _, state, inputs, _ = self._split(tensors)
        num_steps, saved = len(inputs[0]), self._saved if save else []
        states = [x.new_empty((num_steps + 1, *x.shape)) for x in state]
        return states + [state[0].new_empty((num_steps, *x.shape), dtype=x.dtype) for x in saved]

    def empty_backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors of the shapes that :meth:`backward` returns."""
        shared, state, inputs, _ = self._split(tensors)
        return [x.new_empty(x.shape) for x in (*compress(shared, self._trained), *state, *inputs)]

    def align(self, gradients: Sequence[Tensor], num_tensors: int) -> list[Tensor | None]:
        """Gradients of all arguments of the loop from those that :meth:`backward` returns, None for the others."""
        remaining: Iterator[Tensor] = iter(gradients)
        aligned = [next(remaining) if trained else None for trained in self._trained]
        aligned += remaining
        return aligned + [None] * (num_tensors - len(aligned))

    def _split(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Arguments as shared tensors, state, inputs, and all that follows."""
        return _parts(tensors, len(self._trained), self.num_state, self._num_inputs)

    def _noise_of(self, noise: Sequence[Tensor], k: int) -> Sequence[Tensor]:
        return noise[k * self._num_noise : (k + 1) * self._num_noise]

    def _flat_step(self, *tensors: Tensor) -> list[Tensor]:
        return self._function(*self._split(tensors))

    def _need_gradients(self, shared: Sequence[Tensor], state: Sequence[Tensor], *others: Sequence[Tensor]) -> list[bool]:
        """Whether each of the shared tensors requires a gradient and affects the next state."""
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in shared]
        start = [x.requires_grad_() for x in _detached(state)]
        with torch.enable_grad():
            next_state = self._function(leaves, start, *map(_detached, others))
            total = torch.stack([x.sum() for x in next_state]).sum()
        # The state is included because at least one tensor must require a gradient.
        trained = [*start, *(x for x in leaves if x.requires_grad)]
        gradients = iter(torch.autograd.grad(total, trained, allow_unused=True)[len(start) :])
        return [x.requires_grad and next(gradients) is not None for x in leaves]

    def _step_and_gradients(self, *tensors: Tensor) -> list[Tensor]:
        """The next state; gradients of state and inputs, given those of the next state; and totals of the shared gradients."""
        shared, state, inputs, others = self._split(tensors)
        noise, gradients, totals = _parts(others, self._num_noise, self.num_state)
        shared = [x.detach().requires_grad_(trained) for x, trained in zip(shared, self._trained, strict=True)]
        state, inputs = ([x.detach().requires_grad_() for x in part] for part in (state, inputs))
        with torch.enable_grad():
            next_state = self._function(shared, state, inputs, noise)
        depends = [x.requires_grad for x in next_state]
        found = torch.autograd.grad(
            list(compress(next_state, depends)),
            [*state, *inputs, *compress(shared, self._trained)],
            list(compress(gradients, depends)),
            allow_unused=True,
            materialize_grads=True,
        )
        step_gradients, shared_gradients = _parts(found, len(state) + len(inputs))
        sums = [total + x for total, x in zip(totals, shared_gradients, strict=True)]
        return [*_detached(next_state), *step_gradients, *sums]


class _LazyGraph:
    """A recorded graph, compiled at the first call."""

    def __init__(self, graph: GraphModule):
        self._graph = graph
        self._compiled: Compiled | None = None

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        if is_recording():  # compiled code cannot be recorded
            return self._graph(*tensors)
        contiguous = [x.contiguous() for x in tensors]
        if self._compiled is None:
            self._compiled = compile_graph(self._graph, contiguous, guarded=False)
        return self._compiled(*contiguous)


class _Loop(Function):
    """A loop as one differentiable operation, which returns the last state."""

    @staticmethod
    def forward(ctx: Any, graphs: _LoopGraphs, save: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        saved = _forward(graphs.name, list(tensors), save)
        ctx.graphs, ctx.num_tensors = graphs, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        return tuple(x[-1] for x in saved[: graphs.num_state])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors, saved = map(list, _parts(ctx.saved_tensors, ctx.num_tensors))
        found = _backward(ctx.graphs.name, tensors, saved, list(gradients))
        return None, None, *ctx.graphs.align(found, len(tensors))


@torch.library.custom_op("pyro_lvgp::loop_forward", mutates_args=())
def _forward(name: str, tensors: list[Tensor], save: bool) -> list[Tensor]:
    return _LOOPS[name].forward(tensors, save)


@_forward.register_fake
def _(name: str, tensors: list[Tensor], save: bool) -> list[Tensor]:
    return _LOOPS[name].empty_forward(tensors, save)


@torch.library.custom_op("pyro_lvgp::loop_backward", mutates_args=())
def _backward(name: str, tensors: list[Tensor], saved: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return _LOOPS[name].backward(tensors, saved, gradients)


@_backward.register_fake
def _(name: str, tensors: list[Tensor], saved: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return _LOOPS[name].empty_backward(tensors)


_NUMBERS = count()
_LOOPS: WeakValueDictionary[str, _LoopGraphs] = WeakValueDictionary()  # custom operations take names, not objects


def _step_of(inputs: Any, k: int) -> Any:
    """Slices of step k."""
    return tree_map(lambda x: x[k], inputs)


def _parts(items: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Split items into groups of given sizes, and the rest."""
    bounds = [0, *accumulate(sizes), len(items)]
    return [items[a:b] for a, b in pairwise(bounds)]


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach() for x in tensors]


def _signature(leaf: Any) -> Hashable:
    """All of a leaf on which a graph depends: for tensors everything but the values."""
    return (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)
