"""The chain of transitions as one operation, beside the transitions one by one under autograd."""

import math
from functools import partial

import pytest
import torch

from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin, UnderdampedLangevin, anneal, initial_state
from pyro_lvgp.ops.langevin import langevin_chain
from pyro_lvgp.ops.rbf_score import RBFScore, score
from tests.ops.test_rbf_score import N, Problem, Q, positive

K = 4


class Setting:
    """A chain to the posterior of latents."""

    def __init__(self, transition, *, draws=(), missing=False, stretch=1.0):
        problem = Problem(missing=missing)
        self.transition = transition
        tensors = problem.coefficients(*problem.parameters()).whitened(torch.randn(N, Q).double(), stretch * positive(N, Q))
        self.tensors = [None if x is None else x.detach() for x in tensors]
        self.z, self.momentum, *self.noise = torch.randn(2 + K, *draws, N, Q).double()
        self.beta = torch.linspace(0.2, 1.0, K).double()
        self.step_size = 0.2 * positive(K, *(1 for _ in draws), 1, Q)
        self.persistence = torch.tensor(0.7).double()
        self.weights = torch.randn(2, *draws, N, Q).double()

    def leaves(self):
        leaves = (self.z, self.momentum, self.beta, self.step_size, self.persistence, *self.tensors)
        return [None if x is None else x.clone().requires_grad_() for x in leaves]

    def at_once(self, z, momentum, beta, step_size, persistence, *tensors):
        schedule = self.transition.in_units_of_momentum(step_size, persistence)
        momentum = momentum if self.transition.has_momentum else None
        limit = self.transition.max_gradient
        chain = langevin_chain(RBFScore(*tensors), z, momentum, self.noise, beta, *schedule, limit)
        return chain.z, chain.log_ratio, chain.first_score

    def one_by_one(self, z, momentum, beta, step_size, persistence, *tensors):
        def of_z(z):
            return (score(RBFScore(*tensors), z[0]),)

        first = initial_state(of_z, (z,), self.transition)
        if self.transition.has_momentum:
            first = first._replace(momentum=(momentum,))
        noise = iter(self.noise)

        def step(state, _, *schedule):
            return self.transition(of_z, state, (next(noise),), *schedule, persistence)

        last = anneal(partial(step), first, beta, (step_size,))
        return last.z[0], last.log_ratio[0], first.score[0].detach()

    def results(self, function):
        leaves = self.leaves()
        values = function(*leaves)
        total = sum((weight * value).sum() for weight, value in zip(self.weights, values[:2], strict=True))
        tensors = [x for x in leaves if x is not None]
        return [*values, *torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)]


TRANSITIONS = {
    "overdamped": OverdampedLangevin(),
    "underdamped": UnderdampedLangevin(),
    "overdamped, no bounds": OverdampedLangevin(max_drift=math.inf, max_gradient=math.inf),
    "underdamped, no bounds": UnderdampedLangevin(max_drift=math.inf, max_gradient=math.inf),
    "underdamped, tight bounds": UnderdampedLangevin(max_drift=0.1, max_gradient=0.5),
    "overdamped, tight bounds": OverdampedLangevin(max_drift=0.1, max_gradient=0.5),
}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("draws", [(), (2,)])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_chain_and_its_derivatives_are_those_of_the_transitions(name, draws, missing):
    setting = Setting(TRANSITIONS[name], draws=draws, missing=missing)
    for fast, slow in zip(setting.results(setting.at_once), setting.results(setting.one_by_one), strict=True):
        torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("name", ["overdamped", "underdamped"])
def test_derivatives_without_limits_are_those_of_differences(name):
    setting = Setting(type(TRANSITIONS[name])(max_gradient=math.inf))
    leaves = [x for x in setting.leaves() if x is not None]

    def values(*leaves):
        before, after = leaves[: 5 + 7], leaves[5 + 7 :]  # no deficit
        return setting.at_once(*before, None, *after)[:2]

    assert torch.autograd.gradcheck(values, leaves)


def test_unstable_chains_have_limited_derivatives():
    limited, free = (Setting(UnderdampedLangevin(max_gradient=bound), stretch=30.0) for bound in (0.5, math.inf))
    gradients = [setting.results(setting.at_once)[3] for setting in (limited, free)]
    assert gradients[0].abs().max() < gradients[1].abs().max()
    for fast, slow in zip(limited.results(limited.at_once), limited.results(limited.one_by_one), strict=True):
        torch.testing.assert_close(fast, slow)


def test_fixed_schedules_have_no_derivative():
    setting = Setting(UnderdampedLangevin())
    z, momentum, *others = setting.leaves()
    fixed = [None if x is None else x.detach() for x in others]
    value, log_ratio, _ = setting.at_once(z, momentum, *fixed)
    slow, slow_log_ratio, _ = setting.one_by_one(z, momentum, *fixed)
    fast = torch.autograd.grad(value.sum() + log_ratio.sum(), [z, momentum])
    for one, other in zip(fast, torch.autograd.grad(slow.sum() + slow_log_ratio.sum(), [z, momentum]), strict=True):
        torch.testing.assert_close(one, other)
