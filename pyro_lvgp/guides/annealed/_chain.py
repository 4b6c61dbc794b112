"""Annealed chain of a target: its transitions, schedule and step sizes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides.annealed import _reverse, transitions
from pyro_lvgp.guides.annealed._autograd_score import AutogradScore, joined, split
from pyro_lvgp.guides.annealed._joint_density import JointDensity
from pyro_lvgp.guides.annealed._resampling import ChainResampling
from pyro_lvgp.guides.annealed._targets import PureTarget, Target
from pyro_lvgp.guides.annealed.transitions import (
    Coordinates,
    DivergedChainError,
    LangevinTransition,
    OverdampedLangevin,
    State,
    Transition,
    UnderdampedLangevin,
)
from pyro_lvgp.infer._compiled_loop import CompiledLoop
from pyro_lvgp.ops import langevin

_NUM_PROBES, _MAX_UNIT_PROBES = 8, 16
_NUM_CHAINS, _NUM_HALVINGS, _PATIENCE = 4, 12, 3
_LEAST_GAIN = 1e-2  # nats of the bound that are worth shorter steps


class ChainEnds(NamedTuple):
    """Ends of a chain.

    :param first_score: ∇ log p at the first position.
    :param z: last position.
    :param log_ratio: Σ_k log r_k − log t_k, entry by entry.
    """

    first_score: Coordinates
    z: Coordinates
    log_ratio: Coordinates


@dataclass(frozen=True)
class AnnealedChain:
    """Annealed chain from the base to a target.

    :param target: the target in whitened coordinates.
    :param transition: the transition.
    :param beta: inverse temperature of each transition.
    :param step_size: step sizes of each transition, for each site over its event.
    :param momentum_persistence: γ; that of each transition with ``reverse``.
    :param loop: compiled transitions, for a :class:`PureTarget`; None to run them eagerly.
    :param reverse: coefficients of the learned reverse kernels of each site, [K, 5, *event]; None for plain annealing.
    :param is_reversed: whether the chain runs from the target to the base.
    :param resampling: resampling of the chains of each datum between transitions; None for independent chains.
    """

    target: Target
    transition: Transition
    beta: Float[Tensor, " K"]
    step_size: Sequence[Float[Tensor, "K ..."]]
    momentum_persistence: Tensor
    loop: CompiledLoop | None
    reverse: Sequence[Float[Tensor, "K 5 ..."]] | None = None
    is_reversed: bool = False
    resampling: ChainResampling | None = None

    def reversed(self) -> "AnnealedChain":
        """Return the chain that runs from the target to the base."""
        return replace(self, is_reversed=True)

    def shortened(self, num_steps: int) -> "AnnealedChain":
        """Return the chain of the first transitions."""
        return replace(
            self,
            beta=self.beta[:num_steps],
            step_size=[eta[:num_steps] for eta in self.step_size],
            momentum_persistence=self.momentum_persistence if self.reverse is None else self.momentum_persistence[:num_steps],
            reverse=None if self.reverse is None else [x[:num_steps] for x in self.reverse],
        )

    def scaled(self, factor: float) -> "AnnealedChain":
        """Return the chain with other step sizes."""
        return replace(self, step_size=[factor * eta for eta in self.step_size])

    def run(self, z: Coordinates) -> ChainEnds:
        """Run the transitions from z."""
        step_size = tuple(_over_plates(eta, x) for eta, x in zip(self.step_size, z, strict=True))
        if self.reverse is not None and len(self.beta):
            return self._run_with_learned_reverse(z, step_size)
        beta = self.beta
        if self.is_reversed:
            beta, step_size = beta.flip(0), tuple(eta.flip(0) for eta in step_size)
        target: Any = self.target
        transition: Any = self.transition
        # A subclass may move chains in another way.
        is_langevin = type(transition) in (OverdampedLangevin, UnderdampedLangevin)
        runs_eagerly = self.loop is None and self.resampling is None
        if runs_eagerly and len(self.beta) and is_langevin and target.differentiable >= torch.is_grad_enabled():
            return self._run_at_once(transition, z, beta, step_size)
        first = transitions.initial_state(target.score, z, transition)

        def step(state: State, inputs: tuple[Tensor, Coordinates], noise: Coordinates) -> State:
            return transition(target.score, state, noise, *inputs, self.momentum_persistence)

        last = self._run_steps(step, (self.momentum_persistence,), first, (beta, step_size))
        return ChainEnds(first.score, last.z, last.log_ratio)

    def _run_with_learned_reverse(self, z: Coordinates, step_size: Coordinates) -> ChainEnds:
        """Run the transitions one by one, compiled if they are to be and run forward."""
        transition: Any = self.transition
        coefficients = [x.unbind(1) for x in self.reverse or ()]
        kernels = tuple(tuple(_over_plates(c, x) for c in cs) for cs, x in zip(coefficients, z, strict=True))
        schedule = _reverse.Schedule(self.beta, step_size, self.momentum_persistence, kernels)
        if self.is_reversed:
            back = _reverse.run_back(transition, self.target.score, z, schedule)
            return ChainEnds(back.score, back.z, back.log_ratio)
        first = _reverse.start(transition, self.target.score, z)
        last = self._run_steps(partial(_reverse.step, transition, self.target.score), (), first, schedule.delayed())
        return ChainEnds(first.score, last.z, _reverse.finish(transition, last, schedule))

    def _run_steps(self, step: Callable[[State, Any, Coordinates], State], shared: tuple, first: State, inputs: Any) -> State:
        """Run the transitions one by one, compiled if they are to be, and resample chains between them.

        :param step: a transition, (state, inputs, noise) ↦ state.
        :param shared: inputs that all compiled transitions share, besides those of the target.
        :param first: first state.
        :param inputs: inputs of all transitions, along the first dimension.
        """
        target: Any = self.target
        loop = self.loop
        noise = [tuple(map(torch.randn_like, first.z)) for _ in range(len(self.beta))]

        def run(state: State, start: int, stop: int) -> State:
            if loop is not None and isinstance(target, PureTarget) and start < stop:
                part = tree_map(lambda x: x[start:stop], inputs)
                return loop((target.bases, target.statistics, *shared, target.differentiable), state, part, noise[start:stop])
            for k in range(start, stop):
                state = step(state, tree_map(itemgetter(k), inputs), noise[k])
            return state

        if self.resampling is None:
            return run(first, 0, len(noise))
        state = self.resampling.start(first)
        for k, beta in enumerate(self.beta):
            state = run(state, k, k + 1)
            if k + 1 < len(noise):
                state = self.resampling(target, state, beta)
        return state._replace(log_ratio=self.resampling.finish(state.log_ratio, first.z))

    def _run_at_once(self, transition: LangevinTransition, z: Coordinates, beta: Tensor, step_size: Coordinates) -> ChainEnds:
        """Run the transitions as one operation, whose derivatives are derived by hand."""
        shapes = [x.shape for x in z]
        score: Any = self.target.score_tensors() if isinstance(self.target, PureTarget) else None
        if score is None:
            score = AutogradScore(self.target.score, shapes)
        elif shapes[0][:-2].numel() == 1:  # matrices take fewer operations than batches of one matrix
            z, step_size = (z[0].view(shapes[0][-2:]),), (step_size[0].flatten(1, -2),)
        if len(z) > 1:
            step_size = tuple(eta.expand(-1, *shape) for eta, shape in zip(step_size, shapes, strict=True))
        momentum = joined(tuple(map(torch.randn_like, z))) if transition.has_momentum else None
        noise = [joined(tuple(map(torch.randn_like, z))) for _ in range(len(beta))]
        schedule = transition.in_units_of_momentum(joined(step_size, 1), self.momentum_persistence)
        chain = langevin.langevin_chain(score, joined(z), momentum, noise, beta, *schedule, transition.max_gradient)
        ends = (split(x, shapes) for x in (chain.first_score, chain.z, chain.log_ratio))
        return ChainEnds(*(tuple(x.view(shape) for x, shape in zip(end, shapes, strict=True)) for end in ends))

    def best_scale(self, z: Coordinates, density: JointDensity) -> float:
        """Return the factor of the step sizes among 1, ½, ¼ … with the largest bound, until it has not risen three times.

        :param z: coordinates, of which only the shapes matter.
        :param density: density of the target, which tells how many chains run at once.
        """
        eager = replace(self, loop=None)  # a graph without gradients would be compiled for this search alone
        batches = list(density.chunks(density.join(z).expand(_NUM_CHAINS, -1)))
        best, largest, num_worse = 0, -math.inf, 0
        for j in range(_NUM_HALVINGS):
            bound = float(eager.scaled(0.5**j)._bound(batches))
            if math.isfinite(bound) and bound > largest + _NUM_CHAINS * _LEAST_GAIN:
                best, largest, num_worse = j, bound, 0
            elif largest > -math.inf and (num_worse := num_worse + 1) == _PATIENCE:
                break
        return 0.5**best

    def _bound(self, batches: Sequence[Coordinates]) -> Tensor:
        """Estimate the bound, up to a constant, summed over batches of chains from the same random numbers at each call."""
        total = torch.zeros(())
        for seed, z in enumerate(batches):
            with seeded(seed):
                try:
                    ends = self.run(tuple(map(torch.randn_like, z)))
                    transitions.check_finite((*ends.z, *ends.log_ratio))
                except DivergedChainError:
                    return torch.tensor(-math.inf)
                log_ratio = torch.stack([x.sum() for x in ends.log_ratio]).sum()
                total = total + (self.target.log_joint(ends.z) + log_ratio).cpu()
        return total


def _over_plates(x: Tensor, z: Tensor) -> Tensor:
    """Reshape [K, *event] to [K, 1, …, 1, *event], to broadcast over the plates of z."""
    return x.reshape(x.shape[:1] + (1,) * (z.dim() - x.dim() + 1) + x.shape[1:])


def curvatures(scores: Callable[[Iterator[Coordinates]], Iterable[Coordinates]], z: Coordinates) -> Coordinates:
    r"""Estimate the curvatures :math:`-\partial^2 \log p / \partial z_i^2` around the base's mean by differences of scores.

    .. math:: c \approx -\tfrac12\, v \odot \big(s(v) - s(-v)\big)

    Each v is a unit vector if there are few coordinates, so that one of them is exact at a time.  Otherwise random signs v
    cancel the contributions of the other coordinates (Hutchinson).

    :param scores: maps points to ∇ log p at each of them, one by one or all at once.
    :param z: coordinates, of which only the shapes matter.
    """
    total: Coordinates = tuple(map(torch.zeros_like, z))
    directions, again = tee(_probes(z))
    found = iter(scores(point for v, _ in directions for point in (v, tuple(-x for x in v))))
    for v, weight in again:
        above, below = next(found), next(found)
        total = tuple(t - 0.5 * weight * x * (a - b) for t, x, a, b in zip(total, v, above, below, strict=True))
    return total


def _probes(z: Coordinates) -> Iterator[tuple[Coordinates, float]]:
    """Yield the directions of curvatures, each with its weight."""
    sizes = [x.numel() for x in z]
    if sum(sizes) <= _MAX_UNIT_PROBES:
        for unit in torch.eye(sum(sizes), dtype=z[0].dtype, device=z[0].device):
            yield tuple(part.reshape(x.shape) for part, x in zip(unit.split(sizes), z, strict=True)), 1.0
        return
    for _ in range(_NUM_PROBES):
        yield tuple(torch.randn_like(x).sign() for x in z), 1.0 / _NUM_PROBES
