r"""Annealed importance sampling: Langevin transitions, and the chain of transitions.

All functions take whitened coordinates z, in which the base is :math:`q_0 = N(0, I)`, so that the bridges
:math:`\log q_k = (1 - \beta_k) \log q_0 + \beta_k \log p` have the scores
:math:`g_k(z) = \beta_k s(z) - (1 - \beta_k) z` with :math:`s = \nabla \log p`.  One evaluation of s at each state is
enough for the two transitions that end and begin there: K transitions need K + 1 scores.  Coordinates are tuples of tensors,
one for each site.

The Langevin transitions are tamed: they move by

.. math:: T(g) = g \Big/ \sqrt{1 + (\eta g / c)^2}, \qquad |\eta\, T(g)| < c,

in place of the score g, entry by entry, forward and in reverse, so that no step explodes however narrow the target is beside
the base.  As T is a function of the state alone, forward and reverse densities keep their form, and :math:`E[w] = Z` is exact.

Their gradients are limited: where a chain is unstable, the derivative of the log weight with respect to an early position is
a product of large factors, one for each transition, and a few such chains would decide the step of an optimiser.  So the
derivatives with respect to each position are clipped to an interval [−b, b], entry by entry, on their way back.  Values of
chains and weights do not change.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

__all__ = [
    "DivergedChainError",
    "LangevinTransition",
    "OverdampedLangevin",
    "State",
    "Transition",
    "UnderdampedLangevin",
    "anneal",
    "as_transition",
    "check_finite",
    "initial_state",
]

Coordinates = tuple[Tensor, ...]
Score = Callable[[Coordinates], Coordinates]
Dynamics = Literal["overdamped", "underdamped"]
Step = Callable[["State", Coordinates, Tensor, Coordinates], "State"]


class State(NamedTuple):
    """State of an annealed chain.

    :param z: position.
    :param score: ∇ log p(z), unannealed.
    :param momentum: ρ; empty for overdamped dynamics.
    :param log_ratio: log ratio of reverse and forward densities, Σ_k log r_k(z_{k−1} | z_k) − log t_k(z_k | z_{k−1}), entry by
        entry.
    """

    z: Coordinates
    score: Coordinates
    momentum: Coordinates
    log_ratio: Coordinates


class Transition(ABC):
    r"""Transition of an annealed chain, and the log ratio of its reverse and forward densities.

    Subclasses implement ``__call__``, which moves the chain from :math:`z_{k-1}` to :math:`z_k` by a forward density
    :math:`t_k(z_k \mid z_{k-1})` and adds :math:`\log r_k(z_{k-1} \mid z_k) - \log t_k(z_k \mid z_{k-1})` to
    ``state.log_ratio``, entry by entry.  The weight of the chain then has :math:`E[w] = Z` for every reverse density
    :math:`r_k`.  An instance is the argument ``dynamics`` of :class:`~pyro_lvgp.guides.AutoAnnealedLangevin`.

    A random walk, whose forward and reverse densities are equal:

    >>> class RandomWalk(Transition):
    ...     def __call__(self, score, state, noise, beta, step_size, momentum_persistence):
    ...         z = tuple(z + (2.0 * eta).sqrt() * e for z, eta, e in zip(state.z, step_size, noise))
    ...         return State(z, score(z), (), state.log_ratio)
    >>> state = initial_state(lambda z: (-z[0],), (torch.zeros(1),), RandomWalk())
    >>> RandomWalk()(lambda z: (-z[0],), state, (torch.ones(1),), torch.ones(()), (torch.tensor(0.5),), torch.zeros(())).z
    (tensor([1.]),)
    """

    has_momentum: ClassVar[bool] = False
    """Whether states have a momentum, which is standard normal at the start of a chain."""

    @abstractmethod
    def __call__(
        self,
        score: Score,
        state: State,
        noise: Coordinates,
        beta: Tensor,
        step_size: Coordinates,
        momentum_persistence: Tensor,
    ) -> State:
        """Move the chain by one transition.

        :param score: gradient of the unannealed log density, z ↦ ∇ log p(z).
        :param state: state before the transition.
        :param noise: standard normal noise, one tensor for each site.
        :param beta: inverse temperature β, the same at both ends.
        :param step_size: η of each site, broadcast against z.
        :param momentum_persistence: γ between 0 and 1, the share of the momentum that persists; learned by the guide.
        :returns: state after the transition.
        """


class LangevinTransition(Transition):
    """Base of the Langevin transitions.

    :param max_drift: bound c of the drift of a step, in units of the base's standard deviation.
    :param max_gradient: bound b of the derivatives of a log weight, in nats for each standard deviation of the base.
    :raises ValueError: unless both are positive; infinity leaves scores, or derivatives, as they are.
    """

    def __init__(self, max_drift: float = 3.0, max_gradient: float = 10.0):
        for name, value in (("max_drift", max_drift), ("max_gradient", max_gradient)):
            if not value > 0.0:
                raise ValueError(f"expected a positive {name}, got {value}; math.inf sets no bound")
        self.max_drift, self.max_gradient = max_drift, max_gradient

    @abstractmethod
    def in_units_of_momentum(
        self, step_size: Tensor, momentum_persistence: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return ε, κ and γ of :func:`~pyro_lvgp.ops.langevin.langevin_chain`.

        :param step_size: η.
        :param momentum_persistence: γ.
        """

    def _drift(self, z: Coordinates, score: Coordinates, beta: Tensor, step_size: Coordinates) -> Coordinates:
        """Compute the tamed score T(g) of a bridge, entry by entry."""
        bridge = (beta * s - (1.0 - beta) * x for x, s in zip(z, score, strict=True))
        if math.isinf(self.max_drift):
            return tuple(bridge)
        return tuple(_tame(g, eta / self.max_drift) for g, eta in zip(bridge, step_size, strict=True))

    def limited(self, z: Coordinates, state: State) -> tuple[Coordinates, State]:
        """Return a new position, and the state before it, unchanged but for the gradient of the position."""
        if math.isinf(self.max_gradient):
            return z, state
        limited = [_LimitGradient.apply(x, total, self.max_gradient) for x, total in zip(z, state.log_ratio, strict=True)]
        z, log_ratio = zip(*limited, strict=True)
        return z, state._replace(log_ratio=log_ratio)


class OverdampedLangevin(LangevinTransition):
    r"""Unadjusted (overdamped) Langevin transition, tamed.

    .. math::

        z' = z + \eta\,T(g(z)) + \sqrt{2\eta}\,\epsilon, \qquad
        \tilde\epsilon = -\big[\sqrt{\eta/2}\,(T(g(z)) + T(g(z'))) + \epsilon\big], \qquad
        \log r - \log t = \tfrac12 (\epsilon^2 - \tilde\epsilon^2)

    :param max_drift: bound c of :math:`\eta\,|T(g)|`, in units of the base's standard deviation.
    :param max_gradient: bound b of the derivatives of a log weight with respect to :math:`z'`, in nats for each standard
        deviation of the base.
    :raises ValueError: unless both are positive; infinity leaves scores, or derivatives, as they are.

    Source: eqs. 14 and 15 of the annealed-GPLVM paper (its algorithm 1 has a sign wrong); taming after Hutzenthaler, Jentzen
    and Kloeden (2012), "Strong convergence of an explicit numerical method for SDEs with nonglobally Lipschitz coefficients".

    >>> score = lambda z: (-4.0 * z[0],)  # of N(0, 1/4)
    >>> step = OverdampedLangevin(max_drift=math.inf)
    >>> at, eta, one = initial_state(score, (torch.ones(1),), step), (torch.tensor(0.1),), torch.ones(())
    >>> moved = step(score, at, (torch.zeros(1),), one, eta, torch.zeros(()))
    >>> moved.z, moved.score, moved.log_ratio
    ((tensor([0.6000]),), (tensor([-2.4000]),), (tensor([-1.0240]),))
    """

    def __call__(
        self,
        score: Score,
        state: State,
        noise: Coordinates,
        beta: Tensor,
        step_size: Coordinates,
        momentum_persistence: Tensor,
    ) -> State:
        g = self._drift(state.z, state.score, beta, step_size)
        z = tuple(z + eta * g + (2.0 * eta).sqrt() * e for z, eta, g, e in zip(state.z, step_size, g, noise, strict=True))
        z, state = self.limited(z, state)
        s = score(z)
        # This is −ε̃; only its square is used.
        reverse = tuple(
            (0.5 * eta).sqrt() * (g + g_new) + e
            for eta, g, g_new, e in zip(step_size, g, self._drift(z, s, beta, step_size), noise, strict=True)
        )
        return State(z, s, (), _updated_log_ratio(state, noise, reverse))

    def in_units_of_momentum(self, step_size, momentum_persistence):
        return (2.0 * step_size).sqrt(), _taming(step_size, self.max_drift), None


class UnderdampedLangevin(LangevinTransition):
    r"""Underdamped Langevin transition, tamed: refreshment of the momentum, and a leapfrog step of ``−log q_k(z) + ½ ‖ρ‖²``.

    .. math::

        \hat\rho = \gamma\rho + \sqrt{1 - \gamma^2}\,\xi, \quad
        \rho_{1/2} = \hat\rho + \tfrac{\eta}{2} T(g(z)), \quad z' = z + \eta \rho_{1/2}, \quad
        \rho' = \rho_{1/2} + \tfrac{\eta}{2} T(g(z')), \quad
        \log r - \log t = \tfrac12 (\hat\rho^2 - \rho'^2)

    Each substep is a shear, which preserves volume for any T.

    :param max_drift: bound c of :math:`\eta\,|T(g)|`, in units of the base's standard deviation.
    :param max_gradient: bound b of the derivatives of a log weight with respect to :math:`z'`, in nats for each standard
        deviation of the base.
    :raises ValueError: unless both are positive; infinity leaves scores, or derivatives, as they are.

    Source: Geffner and Domke (2021), "MCMC variational inference via uncorrected Hamiltonian annealing"; Zhang et al. (2021),
    "Differentiable annealed importance sampling and the perils of gradient noise".

    >>> score = lambda z: (-4.0 * z[0],)  # of N(0, 1/4)
    >>> step = UnderdampedLangevin(max_drift=math.inf)
    >>> at, eta, one = initial_state(score, (torch.ones(1),), step), (torch.tensor(0.1),), torch.ones(())
    >>> moved = step(score, at, (torch.zeros(1),), one, eta, torch.zeros(()))
    >>> moved.z, moved.momentum, moved.log_ratio
    ((tensor([0.9800]),), (tensor([-0.3960]),), (tensor([-0.0784]),))
    """

    has_momentum = True

    def __call__(
        self,
        score: Score,
        state: State,
        noise: Coordinates,
        beta: Tensor,
        step_size: Coordinates,
        momentum_persistence: Tensor,
    ) -> State:
        fresh = (1.0 - momentum_persistence.square()).sqrt()
        before = tuple(momentum_persistence * rho + fresh * e for rho, e in zip(state.momentum, noise, strict=True))
        g = self._drift(state.z, state.score, beta, step_size)
        half = tuple(rho + 0.5 * eta * g for rho, eta, g in zip(before, step_size, g, strict=True))
        z = tuple(z + eta * rho for z, eta, rho in zip(state.z, step_size, half, strict=True))
        z, state = self.limited(z, state)
        s = score(z)
        g = self._drift(z, s, beta, step_size)
        after = tuple(rho + 0.5 * eta * g for rho, eta, g in zip(half, step_size, g, strict=True))
        return State(z, s, after, _updated_log_ratio(state, before, after))

    def in_units_of_momentum(self, step_size, momentum_persistence):
        return step_size, _taming(step_size, self.max_drift), momentum_persistence


TRANSITIONS: dict[Dynamics, Transition] = {"overdamped": OverdampedLangevin(), "underdamped": UnderdampedLangevin()}


def as_transition(dynamics: Dynamics | Transition) -> Transition:
    """Return a transition by name, or the transition itself.

    :param dynamics: ``"overdamped"``, ``"underdamped"``, or a :class:`Transition`.
    :raises ValueError: for another name.

    >>> as_transition("underdamped").has_momentum
    True
    """
    if isinstance(dynamics, Transition):
        return dynamics
    if dynamics not in TRANSITIONS:
        raise ValueError(f"expected dynamics in {tuple(TRANSITIONS)} or a Transition, got {dynamics!r}")
    return TRANSITIONS[dynamics]


def initial_state(score: Score, z: Coordinates, transition: Transition) -> State:
    """Return the initial state of a chain, with its score and, if the transition has a momentum, a standard normal one.

    :param score: z ↦ ∇ log p(z).
    :param z: initial position.
    :param transition: the transition of the chain.

    >>> initial_state(lambda z: (-z[0],), (torch.ones(1),), OverdampedLangevin())
    State(z=(tensor([1.]),), score=(tensor([-1.]),), momentum=(), log_ratio=(tensor([0.]),))
    """
    momentum = tuple(map(torch.randn_like, z)) if transition.has_momentum else ()
    return State(z, score(z), momentum, tuple(map(torch.zeros_like, z)))


def anneal(step: Step, state: State, beta: Float[Tensor, " K"], step_size: tuple[Float[Tensor, "K ..."], ...]) -> State:
    r"""Run the K transitions of an annealed chain.

    For a chain from :math:`z_0 \sim N(0, I)`, the weight :math:`\log w = \log p(z_K) - \log q_0(z_0) + \sum` ``log_ratio`` has
    :math:`E[w] = Z`.  For a reverse chain from an exact draw :math:`z_K \sim p / Z`, with ``beta`` and ``step_size``
    in reverse order and minus ``log_ratio``, the same expression has :math:`E[1 / w] = 1 / Z`.

    :param step: (state, noise, β, η) ↦ state: a :class:`Transition` with its score and momentum_persistence.
    :param state: initial state.
    :param beta: β of each transition.
    :param step_size: η of each transition for each site; the rest of its shape is broadcast against z.

    Source: Neal (2001), "Annealed importance sampling"; eqs. 8 to 18 of the annealed-GPLVM paper.

    >>> from functools import partial
    >>> from pyro_lvgp.guides.annealed.schedules import power_schedule
    >>> score = lambda z: (-4.0 * z[0],)  # of N(0, 1/4)
    >>> state = initial_state(score, (torch.zeros(1000, 1),), OverdampedLangevin())
    >>> step = partial(OverdampedLangevin(), score, momentum_persistence=torch.zeros(()))
    >>> anneal(step, state, power_schedule(2, 1.0), (torch.full((2, 1), 0.1),)).z[0].shape
    torch.Size([1000, 1])
    """
    for k in range(len(beta)):
        noise = tuple(map(torch.randn_like, state.z))
        state = step(state, noise, beta[k], tuple(eta[k] for eta in step_size))
    return state


class DivergedChainError(ValueError):
    """Error of a chain that has left the finite numbers."""


def check_finite(z: Coordinates) -> None:
    """Raise if a chain has diverged.

    :param z: last position of the chain, or anything computed from it.
    :raises DivergedChainError: if a number is not finite.

    >>> check_finite((torch.zeros(3),))
    """
    if not all(torch.isfinite(x).all() for x in z):
        raise DivergedChainError(
            "expected a chain that stays finite, got NaN or infinity: the chain diverged, because its step size is too "
            "large for the gradients of the target; make step_size smaller, or start from a base_guide closer to the posterior"
        )


class _LimitGradient(Function):
    """Identity of a position and a log ratio, with a bound of the gradient of the position.

    The gradient of the log ratio is that of the chain's log weight, so that the bound does not depend on the scale of a loss.
    A loss without the weight sets no bound.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, log_ratio: Tensor, bound: float) -> tuple[Tensor, Tensor]:
        ctx.bound = bound
        return z.view_as(z), log_ratio.view_as(log_ratio)

    @staticmethod
    def backward(ctx: Any, of_z: Tensor, of_log_ratio: Tensor) -> tuple[Tensor, Tensor, None]:
        bound = (ctx.bound * of_log_ratio.abs()).masked_fill(of_log_ratio == 0.0, math.inf)
        return of_z.clamp(-bound, bound), of_log_ratio, None


def _taming(step_size: Tensor, max_drift: float) -> Tensor | None:
    """Return κ of the tamed score g / √(1 + (κ g)²); None without a bound."""
    return None if math.isinf(max_drift) else step_size / max_drift


def _tame(g: Tensor, scale: Tensor) -> Tensor:
    """Compute g / √(1 + (scale · g)²), without overflow for a g of any size."""
    limit = torch.finfo(g.dtype).max ** 0.25
    return (g := g.clamp(-limit, limit)) * torch.rsqrt(1.0 + (scale * g).square())


def _updated_log_ratio(state: State, forward: Coordinates, reverse: Coordinates) -> Coordinates:
    """Add the log ratio of the standard normal densities of reverse and forward noise."""
    return tuple(
        total + 0.5 * (f.square() - r.square()) for total, f, r in zip(state.log_ratio, forward, reverse, strict=True)
    )
