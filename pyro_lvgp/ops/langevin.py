r"""A chain of tamed Langevin transitions, with a hand-derived vector-Jacobian product of the whole chain.

A transition of the position z and the momentum ρ, with the gradient
:math:`g_\beta(z) = \beta\,\nabla \log p(z) - (1 - \beta) z` of a bridge, is

.. math::

    \hat\rho = \gamma\rho + \sqrt{1 - \gamma^2}\,\xi, \quad
    \rho_{1/2} = \hat\rho + \tfrac{\epsilon}{2} T(g_\beta(z)), \quad z' = z + \epsilon \rho_{1/2}, \quad
    \rho' = \rho_{1/2} + \tfrac{\epsilon}{2} T(g_\beta(z')), \quad
    \log r - \log t = \tfrac12 (\hat\rho^2 - \rho'^2)

with the tamed gradient :math:`T(g) = g / \sqrt{1 + (\kappa g)^2}`.  With γ = 0 and :math:`\epsilon = \sqrt{2\eta}` it is
overdamped Langevin dynamics with the step size η.

The chain is one operation for autograd.  Besides the evaluation of the score, a transition takes some twenty tensor operations
forward, and as many backward.  Gradients of parameters that transitions share are sums over transitions, computed once.

Source: Geffner and Domke (2021), "MCMC variational inference via uncorrected Hamiltonian annealing"; taming after
Hutzenthaler, Jentzen and Kloeden (2012), "Strong convergence of an explicit numerical method for SDEs with nonglobally
Lipschitz coefficients".
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["LangevinEnds", "Score", "langevin_chain", "tamed_drift"]


@runtime_checkable
class Score(Protocol):
    """Score of a density with its derivatives."""

    def evaluate(self, X: Tensor) -> tuple[Tensor, Any]:
        """Compute the score, and the intermediate results that its derivatives need."""
        ...

    def tensors(self, evaluated: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the tensors that evaluated scores depend on, besides X."""
        ...

    def pull_back(self, at: Any, bar: Tensor) -> tuple[Tensor, Any]:
        """Compute the derivative of a loss by X, given that by the score, and those by the intermediate results."""
        ...

    def gradients(self, evaluated: Sequence[Any], bars: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Compute the derivatives of a loss by :meth:`tensors`, summed over several evaluations."""
        ...


class LangevinEnds(NamedTuple):
    """Ends of a chain.

    :param z: last position.
    :param log_ratio: Σ_k log r_k − log t_k, entry by entry.
    :param first_score: score at the first position, without gradients.
    """

    z: Float[Tensor, "*shape"]
    log_ratio: Float[Tensor, "*shape"]
    first_score: Float[Tensor, "*shape"]


def langevin_chain(
    score: Score,
    z: Float[Tensor, "*shape"],
    momentum: Float[Tensor, "*shape"] | None,
    noise: Sequence[Float[Tensor, "*shape"]],
    beta: Float[Tensor, " K"],
    step_size: Float[Tensor, "K *#shape"],
    taming: Float[Tensor, "K *#shape"] | None,
    persistence: Float[Tensor, ""] | None,
    max_gradient: float = math.inf,
) -> LangevinEnds:
    """Run a chain of K transitions.

    :param score: ∇ log p.
    :param z: first position.
    :param momentum: first momentum; None for a new one at each transition.
    :param noise: ξ of each transition, without gradients.
    :param beta: β of each transition.
    :param step_size: ε of each transition.
    :param taming: κ of each transition; None for T(g) = g.
    :param persistence: γ; None without a momentum.
    :param max_gradient: bound of the derivatives of a loss by the positions, relative to those by the log ratio, entry by
        entry; entries whose log ratio does not affect the loss have no bound.

    The score of N(0, 1/4), under an RBF kernel that is zero:

    >>> from pyro_lvgp.ops.rbf_score import RBFScore
    >>> one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    >>> score = RBFScore(one, zero, zero, zero - math.inf, one, zero, zero, None, zero, -4.0 * one)
    >>> chain = langevin_chain(score, one, zero, [zero], one[0], 0.1 * one[None], None, torch.tensor(0.8))
    >>> chain.z, chain.log_ratio
    (tensor([[0.9800]]), tensor([[-0.0784]]))
    """
    schedule = (beta, step_size, taming, persistence)
    path = _run(score, z, momentum, noise, *schedule)
    tensors = score.tensors(path.evaluated)
    return LangevinEnds(*_Chain.apply(score, path, max_gradient, noise, z, momentum, *schedule, *tensors))


def tamed_drift(
    z: Float[Tensor, "*shape"],
    score: Float[Tensor, "*shape"],
    beta: Float[Tensor, ""],
    taming: Float[Tensor, "*#shape"] | None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"] | None]:
    """Compute the tamed gradient T(g) of a bridge, and T(g) / g; finite for scores of any size.

    :param z: position.
    :param score: ∇ log p(z).
    :param beta: β.
    :param taming: κ; None for T(g) = g, and None in place of the ratio.

    >>> z, score = torch.zeros(2), torch.tensor([0.1, 1e30])
    >>> tamed_drift(z, score, torch.tensor(1.0), torch.tensor(0.1))
    (tensor([ 0.1000, 10.0000]), tensor([9.9995e-01, 2.3283e-09]))
    """
    g = torch.addcmul(-z, beta, score + z)
    if taming is None:
        return g, None
    limit = torch.finfo(g.dtype).max ** 0.25
    g = g.clamp(-limit, limit)
    ratio = (taming * g).square().add(1.0).rsqrt()
    return g * ratio, ratio


class _Transition(NamedTuple):
    """Intermediate results of a transition, in the order in which they are computed."""

    momentum: Tensor | None
    refreshed: Tensor
    first_drift: Tensor
    first_ratio: Tensor | None
    half: Tensor
    second_drift: Tensor
    second_ratio: Tensor | None
    after: Tensor


class _TransitionBars(NamedTuple):
    """Derivatives of a loss by intermediate results of a transition; those of drifts without their taming, and with it."""

    refreshed: Tensor
    half: Tensor
    z: Tensor
    after: Tensor
    first_drift: Tensor
    first_g: Tensor
    second_drift: Tensor
    second_g: Tensor


class _Path(NamedTuple):
    """Positions of a chain, with the scores there and their intermediate results, and the transitions between them."""

    positions: Sequence[Tensor]
    scores: Sequence[Tensor]
    evaluated: Sequence[Any]
    transitions: Sequence[_Transition]


@torch.no_grad()
def _run(
    score: Score,
    z: Tensor,
    momentum: Tensor | None,
    noise: Sequence[Tensor],
    beta: Tensor,
    step_size: Tensor,
    taming: Tensor | None,
    persistence: Tensor | None,
) -> _Path:
    value, at = score.evaluate(z)
    positions, scores, evaluated, transitions = [z], [value], [at], []
    kappas = (None,) * len(noise) if taming is None else taming.unbind()
    fresh = None if persistence is None else _share_of_noise(persistence)
    for xi, b, eps, kappa in zip(noise, beta.unbind(), step_size.unbind(), kappas, strict=True):
        refreshed = xi
        if fresh is not None and persistence is not None and momentum is not None:
            refreshed = torch.addcmul(fresh * xi, persistence, momentum)
        first_drift, first_ratio = tamed_drift(z, value, b, kappa)
        half = torch.addcmul(refreshed, eps, first_drift, value=0.5)
        z = torch.addcmul(z, eps, half)
        value, at = score.evaluate(z)
        second_drift, second_ratio = tamed_drift(z, value, b, kappa)
        after = torch.addcmul(half, eps, second_drift, value=0.5)
        transitions.append(_Transition(momentum, refreshed, first_drift, first_ratio, half, second_drift, second_ratio, after))
        positions.append(z)
        scores.append(value)
        evaluated.append(at)
        momentum = after
    return _Path(positions, scores, evaluated, transitions)


class _Chain(Function):
    """Ends of a path, as a differentiable function of what the path was computed from."""

    @staticmethod
    def forward(ctx: Any, score, path, max_gradient, noise, z, momentum, beta, step_size, taming, persistence, *tensors):
        squares = (torch.stack([getattr(t, name) for t in path.transitions]).square() for name in ("refreshed", "after"))
        log_ratio = 0.5 * torch.sub(*squares).sum(0)
        ctx.score, ctx.path, ctx.max_gradient, ctx.noise = score, path, max_gradient, noise
        ctx.save_for_backward(beta, step_size, taming, persistence)
        # Tensors of their own, since those of the path are stored.
        last, first_score = path.positions[-1].detach(), path.scores[0].detach()
        ctx.mark_non_differentiable(first_score)
        return last, log_ratio, first_score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, z_bar, log_ratio_bar, _):
        beta, step_size, taming, persistence = ctx.saved_tensors
        score, path = ctx.score, ctx.path
        bound = _bound(log_ratio_bar, ctx.max_gradient)
        columns = (path.transitions, path.evaluated[1:], beta.unbind(), step_size.unbind(), (0.5 * step_size).unbind())
        momentum_bar = score_bar = torch.zeros_like(z_bar)
        bars, score_bars = [], []
        for transition, at, b, eps, half_eps in reversed(list(zip(*columns, strict=True))):
            after_bar = torch.addcmul(momentum_bar, log_ratio_bar, transition.after, value=-1.0)
            second_drift, second_g = _through_taming(half_eps * after_bar, transition.second_ratio)
            own_z_bar, of_score = score.pull_back(at, torch.addcmul(score_bar, b, second_g))
            z_bar = torch.addcmul(z_bar + own_z_bar, b - 1.0, second_g)
            if bound is not None:
                z_bar = z_bar.clamp(-bound, bound)
            half_bar = torch.addcmul(after_bar, eps, z_bar)
            first_drift, first_g = _through_taming(half_eps * half_bar, transition.first_ratio)
            refreshed_bar = torch.addcmul(half_bar, log_ratio_bar, transition.refreshed)
            bars.append(
                _TransitionBars(refreshed_bar, half_bar, z_bar, after_bar, first_drift, first_g, second_drift, second_g)
            )
            score_bars.append(of_score)
            z_bar, score_bar = torch.addcmul(z_bar, b - 1.0, first_g), b * first_g
            if persistence is not None:
                momentum_bar = persistence * refreshed_bar
        own_z_bar, of_score = score.pull_back(path.evaluated[0], score_bar)
        bar = _TransitionBars(*map(torch.stack, zip(*reversed(bars), strict=True)))
        schedule = _schedule_bars(ctx, bar, step_size, taming)
        persistence_bar = None
        if persistence is not None and ctx.needs_input_grad[9]:
            momenta, ratio = torch.stack([t.momentum for t in path.transitions]), persistence / _share_of_noise(persistence)
            along = torch.addcmul(momenta, torch.stack(list(ctx.noise)), ratio, value=-1.0)
            persistence_bar = (bar.refreshed * along).sum()
        of_tensors = score.gradients(path.evaluated, [of_score, *reversed(score_bars)])
        first_momentum_bar = None if persistence is None else momentum_bar
        return None, None, None, None, z_bar + own_z_bar, first_momentum_bar, *schedule, persistence_bar, *of_tensors


def _schedule_bars(
    ctx: Any, bar: _TransitionBars, step_size: Tensor, taming: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the derivatives by β, ε and κ of all transitions."""
    needed, path = ctx.needs_input_grad, ctx.path
    first, half, second = (
        torch.stack([getattr(t, name) for t in path.transitions]) for name in ("first_drift", "half", "second_drift")
    )
    beta_bar = step_bar = taming_bar = None
    if needed[6]:
        by_beta = torch.stack(path.scores) + torch.stack(path.positions)  # ∂g / ∂β at each position
        beta_bar = torch.addcmul(bar.first_g * by_beta[:-1], bar.second_g, by_beta[1:]).reshape(len(first), -1).sum(1)
    if needed[7]:
        kicks = torch.addcmul(second * bar.after, first, bar.half)
        step_bar = torch.add(half * bar.z, kicks, alpha=0.5).sum_to_size(step_size.shape)
    if taming is not None and needed[8]:
        cubes = torch.addcmul(bar.second_drift * second.pow(3), bar.first_drift, first.pow(3))
        taming_bar = -taming * cubes.sum_to_size(taming.shape)  # ∂T / ∂κ = −κ T³
    return beta_bar, step_bar, taming_bar


def _share_of_noise(persistence: Tensor) -> Tensor:
    return (1.0 - persistence.square()).sqrt()


def _through_taming(drift_bar: Tensor, ratio: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the derivative by T(g), and by g; ``∂T / ∂g = (T / g)³``."""
    return drift_bar, drift_bar if ratio is None else drift_bar * ratio.pow(3)


def _bound(log_ratio_bar: Tensor, max_gradient: float) -> Tensor | None:
    """Compute the bound of the derivatives by positions; None without a bound."""
    if math.isinf(max_gradient):
        return None
    return (max_gradient * log_ratio_bar.abs()).masked_fill(log_ratio_bar == 0.0, math.inf)
