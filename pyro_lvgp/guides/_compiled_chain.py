"""Chains along pure scores, of which one transition and its gradient are compiled, however long the chain is."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate, compress, count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_lvgp.annealing import STEPS, Coordinates, Dynamics, State, anneal
from pyro_lvgp.compilation import Compiled, compile_graph
from pyro_lvgp.guides._targets import Bases, HasLogJoint, Whitened, pure_score
from pyro_lvgp.recording import is_recording, record_pure


class CompiledChain:
    """Runs chains; each shape of what a transition takes has two graphs, which all its steps share.

    The first chain of a shape runs as always.  To whoever records or compiles what is around it, a later one is one operation,
    and its gradient another.

    :param dynamics: name of the transition.
    :param model: whose score they climb.
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
        damping: Tensor,
        through: bool,
    ) -> State:
        """:func:`~pyro_lvgp.annealing.anneal` with the pure score."""
        leaves, structure = tree_flatten((bases, statistics, damping))
        start, structure_of_state = tree_flatten(state)
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        signature = (through, structure, structure_of_state, *map(_described, (*leaves, *start, *step_size)))
        if signature not in self._transitions:
            if not is_recording():
                others = [None if given else leaf for leaf, given in zip(leaves, is_tensor, strict=True)]

                def transition(shared: Sequence[Tensor], start: Sequence[Tensor], beta: Tensor, *rest: Tensor) -> list[Tensor]:
                    tensors = iter(shared)
                    filled = [next(tensors) if given else other for other, given in zip(others, is_tensor, strict=True)]
                    bases, statistics, damping = tree_unflatten(filled, structure)
                    score = partial(pure_score, self._model, self._sites, bases, statistics, through)
                    state, num_sites = tree_unflatten(start, structure_of_state), len(step_size)
                    return tree_flatten(self._step(score, state, rest[num_sites:], beta, rest[:num_sites], damping))[0]

                example = [*start, beta[0], *(eta[0] for eta in step_size), *state.z]
                self._transitions[signature] = _Transition(transition, list(compress(leaves, is_tensor)), example, len(start))
            score = partial(pure_score, self._model, self._sites, bases, statistics, through)
            return anneal(partial(self._step, score, damping=damping), state, beta, step_size)
        noise = [torch.randn_like(z) for _ in range(len(beta)) for z in state.z]
        end = _Chain.apply(self._transitions[signature], *compress(leaves, is_tensor), *start, beta, *step_size, *noise)
        return tree_unflatten(end, structure_of_state)


class _Transition:
    """A transition and its gradient, recorded at once and compiled when they are first needed.

    :param function: takes shared tensors and a state as lists, then β, step sizes and noise; returns the next state.
    :param shared: tensors like those that all steps share; those that need a gradient get one.
    :param moving: a state, β, step sizes and noise.
    :param num_state: number of tensors in a state.
    """

    def __init__(
        self, function: Callable[..., list[Tensor]], shared: Sequence[Tensor], moving: Sequence[Tensor], num_state: int
    ):
        self._function, self._num_state, self._num_sites = function, num_state, (len(moving) - num_state - 1) // 2
        self._trained = [x.requires_grad for x in shared]
        with torch.no_grad():
            self._next = _Graph(self._step, [*shared, *moving])
            self._previous = _Graph(self._pull_back, [*shared, *moving, *moving[:num_state], *compress(shared, self._trained)])
        self.number = next(_NUMBERS)
        _TRANSITIONS[self.number] = self

    def climb(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All K + 1 states of a chain, those of each tensor in one."""
        shared, state, schedule, noise = self._split(_detached(tensors))
        states = [state]
        for k in range(len(schedule[0])):
            moving = [*states[-1], *(x[k] for x in schedule), *self._of_step(k, noise)]
            states.append(self._next(*shared, *moving))
        return [torch.stack(rows) for rows in zip(*states, strict=True)]

    def descend(self, tensors: Sequence[Tensor], states: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients, from those in the last state: in the shared tensors that need one, the start, β, and step sizes."""
        shared, _, schedule, noise = self._split(_detached(tensors))
        totals: Sequence[Tensor] = [torch.zeros_like(x) for x in compress(shared, self._trained)]
        by_step = []
        for k in reversed(range(len(schedule[0]))):
            moving = [*(x[k] for x in states), *(x[k] for x in schedule), *self._of_step(k, noise)]
            found = self._previous(*shared, *moving, *gradients, *totals)
            gradients, of_schedule, totals = _parts(found, len(states), len(schedule))
            by_step.append(of_schedule)
        of_schedule = [torch.stack(rows[::-1]) for rows in zip(*by_step, strict=True)]
        return [x.clone(memory_format=torch.contiguous_format) for x in (*totals, *gradients)] + of_schedule

    def empty_states(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like those of :meth:`climb`."""
        _, start, schedule, _ = self._split(tensors)
        return [x.new_empty((len(schedule[0]) + 1, *x.shape)) for x in start]

    def empty_gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like those of :meth:`descend`."""
        shared, start, schedule, _ = self._split(tensors)
        return [x.new_empty(x.shape) for x in (*compress(shared, self._trained), *start, *schedule)]

    def in_order(self, gradients: Sequence[Tensor], num_tensors: int) -> list[Tensor | None]:
        """Gradients of :meth:`descend` where the tensors stand that they belong to."""
        found = iter(gradients)
        of_shared = [next(found) if needed else None for needed in self._trained]
        return [*of_shared, *found, *[None] * (num_tensors - len(self._trained) - self._num_state - 1 - self._num_sites)]

    def _split(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Tensors by what they are: shared, a state, β and step sizes, and what comes after these."""
        return _parts(tensors, len(self._trained), self._num_state, 1 + self._num_sites)

    def _of_step(self, k: int, noise: Sequence[Tensor]) -> Sequence[Tensor]:
        return noise[k * self._num_sites : (k + 1) * self._num_sites]

    def _step(self, *tensors: Tensor) -> list[Tensor]:
        shared, state, schedule, noise = self._split(tensors)
        return self._function(shared, state, *schedule, *noise)

    def _pull_back(self, *tensors: Tensor) -> list[Tensor]:
        """Gradients in what a step takes, from those in what it returns; those in shared tensors are added up."""
        shared, state, schedule, rest = self._split(tensors)
        noise, gradients, totals = _parts(rest, self._num_sites, self._num_state)
        shared = [x.detach().requires_grad_(needed) for x, needed in zip(shared, self._trained, strict=True)]
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
        return [*of_moving, *(total + x for total, x in zip(totals, of_shared, strict=True))]


class _Graph:
    """A function of tensors, recorded, and compiled when it is first called.

    :param function: to record.
    :param tensors: like those that it will be called with.
    """

    def __init__(self, function: Callable[..., list[Tensor]], tensors: list[Tensor]):
        self._graph = record_pure(function, tensors)
        self._compiled: Compiled | None = None

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        if is_recording():  # which what is compiled does not allow
            return self._graph(*tensors)
        if self._compiled is None:
            self._compiled = compile_graph(self._graph, tensors)
        return self._compiled(*tensors)


class _Chain(Function):
    """A chain, from its tensors to those of the last state."""

    @staticmethod
    def forward(ctx: Any, transition: _Transition, *tensors: Tensor) -> tuple[Tensor, ...]:
        states = _climb(transition.number, list(tensors))
        ctx.transition, ctx.num_tensors = transition, len(tensors)
        ctx.save_for_backward(*tensors, *states)
        return tuple(x[-1] for x in states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors, states = map(list, _parts(ctx.saved_tensors, ctx.num_tensors))
        found = _descend(ctx.transition.number, tensors, states, list(gradients))
        return None, *ctx.transition.in_order(found, len(tensors))


@torch.library.custom_op("pyro_lvgp::climb", mutates_args=())
def _climb(number: int, tensors: list[Tensor]) -> list[Tensor]:
    return _TRANSITIONS[number].climb(tensors)


@_climb.register_fake
def _(number: int, tensors: list[Tensor]) -> list[Tensor]:
    return _TRANSITIONS[number].empty_states(tensors)


@torch.library.custom_op("pyro_lvgp::descend", mutates_args=())
def _descend(number: int, tensors: list[Tensor], states: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return _TRANSITIONS[number].descend(tensors, states, gradients)


@_descend.register_fake
def _(number: int, tensors: list[Tensor], states: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return _TRANSITIONS[number].empty_gradients(tensors)


_NUMBERS = count()
_TRANSITIONS: WeakValueDictionary[int, _Transition] = WeakValueDictionary()  # operations take numbers, not objects


def _parts(items: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Items in groups of these sizes, and the rest."""
    bounds = [0, *accumulate(sizes), len(items)]
    return [items[a:b] for a, b in pairwise(bounds)]


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that are alike at each step: a graph is compiled anew for those that need a gradient."""
    return [x.detach() for x in tensors]


def _described(leaf: Any) -> Hashable:
    """What a graph is made for: everything but the values of tensors."""
    return (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
