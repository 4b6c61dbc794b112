"""Annealed chain of a target: its transitions, schedule and step sizes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides.annealed import transitions
from pyro_lvgp.guides.annealed._targets import PureTarget, Target
from pyro_lvgp.guides.annealed.transitions import Coordinates, DivergedChainError, Score, State, Transition
from pyro_lvgp.infer._compiled_loop import CompiledLoop

_NUM_PROBES, _MAX_UNIT_PROBES = 8, 16
_NUM_CHAINS, _NUM_HALVINGS, _PATIENCE = 4, 12, 3


@dataclass(frozen=True)
class AnnealedChain:
    """Annealed chain from the base to a target.

    :param target: the target in whitened coordinates.
    :param transition: the transition.
    :param beta: inverse temperature of each transition.
    :param step_size: step sizes of each transition, for each site over its event.
    :param momentum_persistence: γ.
    :param loop: compiled transitions, for a :class:`PureTarget`; None to run them eagerly.
    """

    target: Target
    transition: Transition
    beta: Float[Tensor, " K"]
    step_size: Sequence[Float[Tensor, "K ..."]]
    momentum_persistence: Tensor
    loop: CompiledLoop | None

    def reversed(self) -> "AnnealedChain":
        """Return the chain with its transitions in reverse order."""
        return replace(self, beta=self.beta.flip(0), step_size=[eta.flip(0) for eta in self.step_size])

    def shortened(self, num_steps: int) -> "AnnealedChain":
        """Return the chain of the first transitions."""
        return replace(self, beta=self.beta[:num_steps], step_size=[eta[:num_steps] for eta in self.step_size])

    def scaled(self, factor: float) -> "AnnealedChain":
        """Return the chain with other step sizes."""
        return replace(self, step_size=[factor * eta for eta in self.step_size])

    def run(self, z: Coordinates) -> tuple[State, State]:
        """Return the first state, at z, and the last."""
        first = transitions.initial_state(self.target.score, z, self.transition)
        # [K, *event] to [K, 1, …, 1, *event], to broadcast over plates.
        step_size = tuple(
            eta.reshape(eta.shape[:1] + (1,) * (x.dim() - eta.dim() + 1) + eta.shape[1:])
            for eta, x in zip(self.step_size, z, strict=True)
        )
        if self.loop is None or not isinstance(self.target, PureTarget) or not len(self.beta):
            step = partial(self.transition, self.target.score, momentum_persistence=self.momentum_persistence)
            return first, transitions.anneal(step, first, self.beta, step_size)
        noise = [tuple(map(torch.randn_like, z)) for _ in range(len(self.beta))]
        shared = (self.target.bases, self.target.statistics, self.momentum_persistence, self.target.differentiable)
        return first, self.loop(shared, first, (self.beta, step_size), noise)

    def best_scale(self, z: Coordinates) -> float:
        """Return the factor of the step sizes among 1, ½, ¼ … with the largest bound, until that falls three times.

        :param z: coordinates, of which only the shapes matter.
        """
        eager = replace(self, loop=None)  # a graph without gradients would be compiled for this search alone
        best, largest, num_worse = 0, -math.inf, 0
        for j in range(_NUM_HALVINGS):
            bound = float(eager.scaled(0.5**j)._bound(z))
            if math.isfinite(bound) and bound > largest:
                best, largest, num_worse = j, bound, 0
            elif largest > -math.inf and (num_worse := num_worse + 1) == _PATIENCE:
                break
        return 0.5**best

    def _bound(self, z: Coordinates) -> Tensor:
        """Estimate the bound, up to a constant, from the same random numbers at each call."""
        total = torch.zeros(())
        for seed in range(_NUM_CHAINS):
            with seeded(seed):
                try:
                    _, last = self.run(tuple(map(torch.randn_like, z)))
                    transitions.check_finite((*last.z, *last.log_ratio))
                except DivergedChainError:
                    return torch.tensor(-math.inf)
                log_ratio = torch.stack([x.sum() for x in last.log_ratio]).sum()
                total = total + (self.target.log_joint(last.z) + log_ratio).cpu()
        return total


def curvatures(score: Score, z: Coordinates) -> Coordinates:
    r"""Estimate the curvatures :math:`-\partial^2 \log p / \partial z_i^2` around the base's mean by differences of scores.

    .. math:: c \approx -\tfrac12\, v \odot \big(s(v) - s(-v)\big)

    Each v is a unit vector if there are few coordinates, so that one of them is exact at a time.  Otherwise random signs v
    cancel the contributions of the other coordinates (Hutchinson).

    :param score: z ↦ ∇ log p(z).
    :param z: coordinates, of which only the shapes matter.
    """
    total: Coordinates = tuple(map(torch.zeros_like, z))
    for v, weight in _probes(z):
        above, below = score(v), score(tuple(-x for x in v))
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
