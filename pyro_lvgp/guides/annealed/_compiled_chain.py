"""Chains along pure scores, of which one transition and its gradient are compiled, however long the chain is."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate, compress, count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_lvgp._compile.compilation import Compiled, compile_graph
from pyro_lvgp._compile.gradient_graphs import split_gradient
from pyro_lvgp._compile.recording import is_recording, record_pure
from pyro_lvgp.guides.annealed._targets import Bases, Whitened, pure_score
from pyro_lvgp.guides.annealed.transitions import STEPS, Coordinates, Dynamics, State, anneal
from pyro_lvgp.infer.protocols import HasLogJoint


class CompiledChain:
    """Runs chains; each shape of what a transition takes has graphs that all its steps share.

    The first chain of a shape runs as always.  To whoever records or compiles what is around it, a later one is one operation,
    and its gradient another.

    :param dynamics: name of the transition.
    :param model: whose score they forward.
    :param sites: the annealed sites.
    """

    def __init__(self, dynamics: Dynamics, model: HasLogJoint, sites: Whitened):
        self._step, self._model, self._sites = STEPS[dynamics], model, sites
        self._transitions: dict[Hashable, _Transition] = {}

    def anneal(
        self,
        state: State,
        beta: Tensor,
        step_size: Coordinates,
        *,
        bases: Bases,
        statistics: Any,
        momentum_persistence: Tensor,
        through: bool,
    ) -> State:
        """:func:`~pyro_lvgp.guides.annealed.transitions.anneal` with the pure score."""
        leaves, structure = tree_flatten((bases, statistics, momentum_persistence))
        start, structure_of_state = tree_flatten(state)
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        signature = (through, structure, structure_of_state, *map(_described, (*leaves, *start, *step_size)))
        if signature not in self._transitions:
            if not is_recording():
                others = [None if given else leaf for leaf, given in zip(leaves, is_tensor, strict=True)]

                def transition(shared: Sequence[Tensor], start: Sequence[Tensor], beta: Tensor, *rest: Tensor) -> list[Tensor]:
                    tensors = iter(shared)
                    filled = [next(tensors) if given else other for other, given in zip(others, is_tensor, strict=True)]
                    bases, statistics, momentum_persistence = tree_unflatten(filled, structure)
                    score = partial(pure_score, self._model, self._sites, bases, statistics, through)
                    state, num_sites = tree_unflatten(start, structure_of_state), len(step_size)
                    return tree_flatten(
                        self._step(score, state, rest[num_sites:], beta, rest[:num_sites], momentum_persistence)
                    )[0]

                example = [*start, beta[0], *(eta[0] for eta in step_size), *state.z]
                self._transitions[signature] = _Transition(transition, list(compress(leaves, is_tensor)), example, len(start))
            score = partial(pure_score, self._model, self._sites, bases, statistics, through)
            return anneal(partial(self._step, score, momentum_persistence=momentum_persistence), state, beta, step_size)
        noise = [torch.randn_like(z) for _ in range(len(beta)) for z in state.z]
        taken = [*compress(leaves, is_tensor), *start, beta, *step_size, *noise]
        end = _Chain.apply(self._transitions[signature], torch.is_grad_enabled(), *taken)
        return tree_unflatten(end, structure_of_state)


class _Transition:
    """A transition and its gradient, recorded at once and compiled when they are first needed.

    :param function: takes shared tensors and a state as lists, then β, step sizes and noise; returns the next state.
    :param shared: tensors like those that all steps share; those that a gradient reaches get one.
    :param moving: a state, β, step sizes and noise.
    :param num_state: number of tensors in a state.
    """

    def __init__(
        self, function: Callable[..., list[Tensor]], shared: Sequence[Tensor], moving: Sequence[Tensor], num_state: int
    ):
        self._function, self.num_state, self._num_sites = function, num_state, (len(moving) - num_state - 1) // 2
        self._trained = self._reached(shared, moving)
        taken, like_state, like_totals = [*shared, *moving], moving[:num_state], compress(shared, self._trained)
        with torch.no_grad():
            self._next = _Graph(record_pure(self._step, taken))
            joint = record_pure(self._step_and_pull_back, [*taken, *like_state, *like_totals])
        forward, backward, expensive = split_gradient(joint, len(taken), num_state)
        self._next_keeping, self._previous = _Graph(forward), _Graph(backward)
        self._kept = [node.meta["val"] for node in expensive]
        # Compiled code is kept on the disk by the text of a graph, which so has to tell what its operations return.
        kept = [(list(x.shape), x.dtype) for x in self._kept]
        self.name = f"{next(_NUMBERS)}: keeps {kept}, trains {self._trained}"
        _TRANSITIONS[self.name] = self

    def forward(self, tensors: Sequence[Tensor], keep: bool) -> list[Tensor]:
        """All K + 1 states of a chain, those of each tensor in one; and what its steps keep for gradients, if they are to."""
        shared, state, schedule, noise = self._split(_detached(tensors))
        step = self._next_keeping if keep else self._next
        states, kept = [state], []
        for k in range(len(schedule[0])):
            moving = [*states[-1], *(x[k] for x in schedule), *self._of_step(k, noise)]
            following, expensive = _parts(step(*shared, *moving), self.num_state)
            states.append(following)
            kept.append(expensive)
        return [torch.stack(rows) for steps in (states, kept) for rows in zip(*steps, strict=True)]

    def backward(
        self, tensors: Sequence[Tensor], states_and_saved: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradients, from those in the last state: in the shared tensors that need one, the start, β, and step sizes."""
        shared, _, schedule, noise = self._split(_detached(tensors))
        totals: Sequence[Tensor] = [torch.zeros_like(x) for x in compress(shared, self._trained)]
        by_step = []
        for k in reversed(range(len(schedule[0]))):
            states, kept = _parts([x[k] for x in states_and_saved], self.num_state)
            moving = [*states, *(x[k] for x in schedule), *self._of_step(k, noise)]
            found = self._previous(*shared, *moving, *kept, *gradients, *totals)
            gradients, of_schedule, totals = _parts(found, self.num_state, len(schedule))
            by_step.append(of_schedule)
        of_schedule = [torch.stack(rows[::-1]) for rows in zip(*by_step, strict=True)]
        return [x.clone(memory_format=torch.contiguous_format) for x in (*totals, *gradients)] + of_schedule

    def empty_forward(self, tensors: Sequence[Tensor], keep: bool) -> list[Tensor]:
        """Tensors like those of :meth:`forward`."""
        _, start, schedule, _ = self._split(tensors)
        num_steps, kept = len(schedule[0]), self._kept if keep else []
        states = [x.new_empty((num_steps + 1, *x.shape)) for x in start]
        return states + [start[0].new_empty((num_steps, *x.shape), dtype=x.dtype) for x in kept]

    def empty_gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like those of :meth:`backward`."""
        shared, start, schedule, _ = self._split(tensors)
        return [x.new_empty(x.shape) for x in (*compress(shared, self._trained), *start, *schedule)]

    def in_order(self, gradients: Sequence[Tensor], num_tensors: int) -> list[Tensor | None]:
        """Gradients of :meth:`backward` where the tensors stand that they belong to."""
        found = iter(gradients)
        in_order = [next(found) if needed else None for needed in self._trained]
        in_order += found
        return in_order + [None] * (num_tensors - len(in_order))

    def _split(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Tensors by what they are: shared, a state, β and step sizes, and what comes after these."""
        return _parts(tensors, len(self._trained), self.num_state, 1 + self._num_sites)

    def _of_step(self, k: int, noise: Sequence[Tensor]) -> Sequence[Tensor]:
        return noise[k * self._num_sites : (k + 1) * self._num_sites]

    def _step(self, *tensors: Tensor) -> list[Tensor]:
        shared, state, schedule, noise = self._split(tensors)
        return self._function(shared, state, *schedule, *noise)

    def _reached(self, shared: Sequence[Tensor], moving: Sequence[Tensor]) -> list[bool]:
        """Which of the shared tensors need a gradient, and have one."""
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in shared]
        state, rest = map(_detached, _parts(moving, self.num_state))
        with torch.enable_grad():
            following = self._function(leaves, [x.requires_grad_() for x in state], *rest)
            total = torch.stack([x.sum() for x in following]).sum()
        # Of the state as well, so that there always is one to be taken.
        taken = [*state, *(x for x in leaves if x.requires_grad)]
        found = iter(torch.autograd.grad(total, taken, allow_unused=True)[len(state) :])
        return [x.requires_grad and next(found) is not None for x in leaves]

    def _step_and_pull_back(self, *tensors: Tensor) -> list[Tensor]:
        """What a step returns; and gradients in what it takes, from those in this; those in shared tensors are added up."""
        shared, state, schedule, rest = self._split(tensors)
        noise, gradients, totals = _parts(rest, self._num_sites, self.num_state)
        shared = [x.detach().requires_grad_(trained) for x, trained in zip(shared, self._trained, strict=True)]
        state, schedule = ([x.detach().requires_grad_() for x in part] for part in (state, schedule))
        with torch.enable_grad():
            following = self._function(shared, state, *schedule, *noise)
        depends = [x.requires_grad for x in following]
        moving = [*state, *schedule]
        found = torch.autograd.grad(
            list(compress(following, depends)),
            [*moving, *compress(shared, self._trained)],
            list(compress(gradients, depends)),
            allow_unused=True,
            materialize_grads=True,
        )
        of_moving, of_shared = _parts(found, len(moving))
        return [*_detached(following), *of_moving, *(total + x for total, x in zip(totals, of_shared, strict=True))]


class _Graph:
    """A recorded graph, compiled when it is first called."""

    def __init__(self, graph: GraphModule):
        self._graph = graph
        self._compiled: Compiled | None = None

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        if is_recording():  # which what is compiled does not allow
            return self._graph(*tensors)
        alike = [x.contiguous() for x in tensors]
        if self._compiled is None:
            self._compiled = compile_graph(self._graph, alike, guarded=False)
        return self._compiled(*alike)


class _Chain(Function):
    """A chain, from its tensors to those of the last state."""

    @staticmethod
    def forward(ctx: Any, transition: _Transition, keep: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        states_and_saved = _forward(transition.name, list(tensors), keep)
        ctx.transition, ctx.num_tensors = transition, len(tensors)
        ctx.save_for_backward(*tensors, *states_and_saved)
        return tuple(x[-1] for x in states_and_saved[: transition.num_state])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors, states_and_saved = map(list, _parts(ctx.saved_tensors, ctx.num_tensors))
        found = _backward(ctx.transition.name, tensors, states_and_saved, list(gradients))
        return None, None, *ctx.transition.in_order(found, len(tensors))


@torch.library.custom_op("pyro_lvgp::forward", mutates_args=())
def _forward(name: str, tensors: list[Tensor], keep: bool) -> list[Tensor]:
    return _TRANSITIONS[name].forward(tensors, keep)


@_forward.register_fake
def _(name: str, tensors: list[Tensor], keep: bool) -> list[Tensor]:
    return _TRANSITIONS[name].empty_forward(tensors, keep)


@torch.library.custom_op("pyro_lvgp::backward", mutates_args=())
def _backward(name: str, tensors: list[Tensor], states_and_saved: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return _TRANSITIONS[name].backward(tensors, states_and_saved, gradients)


@_backward.register_fake
def _(name: str, tensors: list[Tensor], states_and_saved: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return _TRANSITIONS[name].empty_gradients(tensors)


_NUMBERS = count()
_TRANSITIONS: WeakValueDictionary[str, _Transition] = WeakValueDictionary()  # operations take names, not objects


def _parts(items: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Items in groups of these sizes, and the rest."""
    bounds = [0, *accumulate(sizes), len(items)]
    return [items[a:b] for a, b in pairwise(bounds)]


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that are alike at each step: a graph is compiled anew for those that need a gradient."""
    return [x.detach() for x in tensors]


def _described(leaf: Any) -> Hashable:
    """What a graph is made for: everything but the values of tensors."""
    return (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)
