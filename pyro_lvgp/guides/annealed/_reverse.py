r"""Annealed chains whose reverse transitions have learned Gaussian kernels.

In units of momentum, both Langevin dynamics are a refreshment of the momentum and a leapfrog step, which preserves volume:

.. math:: \hat\rho_k = \gamma_k \rho_{k-1} + \sqrt{1 - \gamma_k^2}\,\xi_k, \qquad (z_k, \rho_k) = \Phi_k(z_{k-1}, \hat\rho_k)

with γ = 0 for overdamped dynamics.  The reverse of the refreshment after step k draws

.. math::

    \rho_k = \gamma_{k+1} \hat\rho_{k+1} + \sqrt{1 - \gamma_{k+1}^2}\,u, \qquad u \sim N(m_k, s_k^2), \qquad
    m_k = a_k + b_k z_k + c_k\,\epsilon_{k+1} T(g_{k+1}(z_k)) + d_k \hat\rho_{k+1}

entry by entry, where :math:`m_k = 0` and :math:`s_k = 1` is the reverse of plain annealing.  The last momentum has the density
of :math:`u` with γ = 0, the drift of step K and no :math:`d_K`.  The score in T(g) is known, so that the kernels need no
further gradients.  :math:`E[w] = Z` holds for all values of a, b, c, d and s.  For a target with independent Gaussian entries
the exact reverse of a chain without taming is of this family, and the gap of the bound is then the divergence of the last
position's distribution :math:`q_K` from the target alone: :math:`w = p(z_K) / q_K(z_K)`.

Source: Geffner and Domke (2023), "Langevin diffusion variational inference"; Vargas, Padhy, Blessing and Nüsken (2024),
"Transport meets variational inference: controlled Monte Carlo diffusions".
"""

from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_lvgp.guides.annealed.transitions import Coordinates, LangevinTransition, Score, State
from pyro_lvgp.ops.langevin import tamed_drift

NUM_COEFFICIENTS = 5


class Schedule(NamedTuple):
    """Inputs of one transition, or of all along the first dimension.

    :param beta: β.
    :param step_size: η of each site.
    :param persistence: γ.
    :param kernels: a, b, c, d and log s of each site, of the kernel of the refreshment before the step.
    """

    beta: Tensor
    step_size: Coordinates
    persistence: Tensor
    kernels: tuple[Coordinates, ...]

    def at(self, k: int) -> "Schedule":
        """Return the inputs of transition k."""
        return tree_map(itemgetter(k), self)

    def delayed(self) -> "Schedule":
        """Return the schedule with the kernel of each step at the next one; the kernel of the first draws no correction."""
        kernels = tuple(tuple(torch.cat([torch.zeros_like(x[:1]), x[:-1]]) for x in kernel) for kernel in self.kernels)
        return self._replace(kernels=kernels)


def start(transition: LangevinTransition, score: Score, z: Coordinates) -> State:
    """Return the state of a forward chain at z, with a standard normal momentum if any of it persists."""
    zeros = tuple(map(torch.zeros_like, z))
    return State(z, score(z), tuple(map(torch.randn_like, z)) if transition.has_momentum else zeros, zeros)


def step(transition: LangevinTransition, score: Score, state: State, schedule: Schedule, noise: Coordinates) -> State:
    """Refresh the momentum, and take a leapfrog step forward."""
    refreshed, totals = [], []
    sites = zip(
        state.z, state.score, state.momentum, noise, schedule.step_size, schedule.kernels, state.log_ratio, strict=True
    )
    for z, s, rho, xi, eta, kernel, total in sites:
        eps, kappa, gamma = transition.in_units_of_momentum(eta, schedule.persistence)
        rho_hat, u = xi, rho
        if gamma is not None:
            fresh = (1.0 - gamma.square()).sqrt()
            rho_hat, u = gamma * rho + fresh * xi, fresh * rho - gamma * xi
        drift = eps * tamed_drift(z, s, schedule.beta, kappa)[0]
        refreshed.append(rho_hat)
        totals.append(total + _correction(kernel, u, z, drift, rho_hat))
    state = state._replace(momentum=tuple(refreshed), log_ratio=tuple(totals))
    return _leapfrog(transition, score, state, schedule, 1.0)


def finish(transition: LangevinTransition, state: State, schedule: Schedule) -> Coordinates:
    """Return the log ratio of a forward chain, with the density of its last momentum.

    :param transition: the transition of the chain.
    :param state: last state.
    :param schedule: that of all transitions, not delayed.
    """
    last, totals = schedule.at(-1), []
    for i, (total, rho) in enumerate(zip(state.log_ratio, state.momentum, strict=True)):
        drift = _drift(transition, state, last, i)
        totals.append(total + _correction(last.kernels[i], rho, state.z[i], drift, torch.zeros_like(rho)))
    return tuple(totals)


def run_back(transition: LangevinTransition, score: Score, z: Coordinates, schedule: Schedule) -> State:
    """Run a chain from its last position to the first by draws of the learned kernels.

    The log ratio of the result is that of forward and reverse densities, minus that of the forward chain.

    :param transition: the transition of the chain.
    :param score: z ↦ ∇ log p(z).
    :param z: last position.
    :param schedule: that of all transitions, not delayed, in the order of the forward chain.
    """
    num_steps = len(schedule.beta)
    zeros = tuple(map(torch.zeros_like, z))
    state = State(z, score(z), zeros, zeros)
    for k in reversed(range(num_steps)):
        # The refreshment after step k has the drift and the persistence of the next step.
        is_last = k == num_steps - 1
        own, following = schedule.at(k), schedule.at(k if is_last else k + 1)
        momentum, totals = [], []
        for i, rho_hat in enumerate(state.momentum):
            _, _, gamma = transition.in_units_of_momentum(following.step_size[i], following.persistence)
            drift = _drift(transition, state, following, i)
            kernel = own.kernels[i]
            u = _mean(kernel, state.z[i], drift, rho_hat) + kernel[-1].exp() * torch.randn_like(rho_hat)
            rho = u if gamma is None or is_last else gamma * rho_hat + (1.0 - gamma.square()).sqrt() * u
            momentum.append(rho)
            totals.append(state.log_ratio[i] + _correction(kernel, u, state.z[i], drift, rho_hat))
        state = _leapfrog(transition, score, state._replace(momentum=tuple(momentum), log_ratio=tuple(totals)), own, -1.0)
    return state._replace(log_ratio=tuple(-x for x in state.log_ratio))


def _leapfrog(transition: LangevinTransition, score: Score, state: State, schedule: Schedule, sign: float) -> State:
    """Take a leapfrog step, or undo one for sign −1, and add its log ratio of the forward chain."""
    units = [transition.in_units_of_momentum(eta, schedule.persistence) for eta in schedule.step_size]
    half, moved = [], []
    for i, (z, rho, (eps, _, _)) in enumerate(zip(state.z, state.momentum, units, strict=True)):
        half.append(rho + 0.5 * sign * _drift(transition, state, schedule, i))
        moved.append(z + sign * eps * half[-1])
    position, state = transition.limited(tuple(moved), state)
    new = State(position, score(position), state.momentum, state.log_ratio)
    after = tuple(rho + 0.5 * sign * _drift(transition, new, schedule, i) for i, rho in enumerate(half))
    pairs = zip(state.log_ratio, state.momentum, after, strict=True)
    log_ratio = tuple(total + 0.5 * sign * (before.square() - rho.square()) for total, before, rho in pairs)
    return new._replace(momentum=after, log_ratio=log_ratio)


def _drift(transition: LangevinTransition, state: State, schedule: Schedule, i: int) -> Tensor:
    """Compute ε T(g) of a site."""
    eps, kappa, _ = transition.in_units_of_momentum(schedule.step_size[i], schedule.persistence)
    return eps * tamed_drift(state.z[i], state.score[i], schedule.beta, kappa)[0]


def _mean(kernel: Coordinates, z: Tensor, drift: Tensor, rho_hat: Tensor) -> Tensor:
    a, b, c, d, _ = kernel
    return a + b * z + c * drift + d * rho_hat


def _correction(kernel: Coordinates, u: Tensor, z: Tensor, drift: Tensor, rho_hat: Tensor) -> Tensor:
    """Compute log N(u; m, s²) − log N(u; 0, 1)."""
    log_s = kernel[-1]
    standardised = (u - _mean(kernel, z, drift, rho_hat)) * (-log_s).exp()
    return 0.5 * (u.square() - standardised.square()) - log_s
