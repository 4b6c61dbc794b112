"""Chains on Gaussian targets, where everything is known in closed form."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.distributions import Normal

from pyro_lvgp.guides.annealed.schedules import increasing_schedule, power_schedule, sigmoid_schedule
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS, OverdampedLangevin, UnderdampedLangevin, anneal, initial_state

PRECISION = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -0.5], dtype=torch.float64)
LOG_Z = math.log(2.0 * math.pi) - 0.5 * torch.logdet(PRECISION).item()
STEP_SIZE = {"overdamped": 0.15, "underdamped": 0.5}
DAMPING = torch.tensor(0.8, dtype=torch.float64)
NUM_DRAWS = 100_000


def log_p(z):
    """Unnormalised, with log Z = LOG_Z."""
    return -0.5 * ((z - MEAN) @ PRECISION * (z - MEAN)).sum(-1)


def score(z):
    return (-(z[0] - MEAN) @ PRECISION,)


def run(dynamics, num_steps, start, *, downwards=False, score=score):
    beta = power_schedule(num_steps, 1.0).double()
    beta = beta.flip(0) if downwards else beta
    step_size = (torch.full((num_steps, 1), STEP_SIZE[dynamics], dtype=torch.float64),)
    transition = partial(TRANSITIONS[dynamics], score, momentum_persistence=DAMPING)
    return anneal(transition, initial_state(score, (start,), TRANSITIONS[dynamics]), beta, step_size)


def log_weights(dynamics, num_steps):
    z = torch.randn(NUM_DRAWS, 2, dtype=torch.float64)
    state = run(dynamics, num_steps, z)
    return log_p(state.z[0]) - Normal(0.0, 1.0).log_prob(z).sum(-1) + state.log_ratio[0].sum(-1)


def standard_error(x):
    return x.std() / len(x) ** 0.5


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
@pytest.mark.parametrize("num_steps", [1, 4, 16, 64])
def test_weights_are_unbiased_for_the_evidence(dynamics, num_steps):
    w = (log_weights(dynamics, num_steps) - LOG_Z).exp()
    assert standard_error(w) < 0.006
    assert abs(w.mean() - 1.0) < 3.0 * standard_error(w)


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_bound_rises_with_the_number_of_steps_and_stays_below_the_evidence(dynamics):
    bounds = [log_weights(dynamics, num_steps).mean().item() for num_steps in (1, 4, 16, 64)]
    assert all(longer > shorter + 0.05 for shorter, longer in itertools.pairwise(bounds))
    assert bounds[-1] < LOG_Z
    assert bounds[-1] > LOG_Z - 0.25


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_downwards_from_exact_draws_the_inverse_weights_are_unbiased(dynamics):
    posterior = torch.distributions.MultivariateNormal(MEAN, precision_matrix=PRECISION)
    z = posterior.sample((NUM_DRAWS,))
    state = run(dynamics, 64, z, downwards=True)
    log_w = log_p(z) - Normal(0.0, 1.0).log_prob(state.z[0]).sum(-1) - state.log_ratio[0].sum(-1)
    inverse = (LOG_Z - log_w).exp()
    assert standard_error(inverse) < 0.01
    assert abs(inverse.mean() - 1.0) < 3.0 * standard_error(inverse)
    assert LOG_Z < log_w.mean() < LOG_Z + 0.25


@pytest.mark.parametrize("max_drift", [math.inf, 0.5])
def test_log_ratio_is_that_of_the_transition_densities(max_drift):
    """One overdamped step against log N(z; z' + η T(z'), 2η) − log N(z'; z + η T(z), 2η), written out."""
    z, noise = torch.randn(2, 7, 2, dtype=torch.float64)
    beta, eta = torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.1, 0.4], dtype=torch.float64)
    transition = OverdampedLangevin(max_drift)
    new = transition(score, initial_state(score, (z,), transition), (noise,), beta, (eta,), DAMPING)

    def drifted(z):
        g = beta * score((z,))[0] - (1.0 - beta) * z
        return z + eta * g / (1.0 + (eta * g / max_drift).square()).sqrt()

    scale = (2.0 * eta).sqrt()
    assert torch.allclose(new.z[0], drifted(z) + scale * noise)
    want = Normal(drifted(new.z[0]), scale).log_prob(z) - Normal(drifted(z), scale).log_prob(new.z[0])
    assert torch.allclose(new.log_ratio[0], want)


def test_leapfrog_retraces_its_steps_with_the_momentum_turned():
    z, noise = torch.randn(2, 7, 2, dtype=torch.float64)
    beta, eta, keep = (torch.tensor(x, dtype=torch.float64) for x in (0.3, 0.4, 1.0))
    step = partial(
        TRANSITIONS["underdamped"], score, noise=(torch.zeros_like(z),), beta=beta, step_size=(eta,), momentum_persistence=keep
    )
    state = initial_state(score, (z,), TRANSITIONS["underdamped"])._replace(momentum=(noise,))
    there = step(state)
    back = step(there._replace(momentum=(-there.momentum[0],)))
    assert torch.allclose(back.z[0], z)
    assert torch.allclose(back.momentum[0], -noise)
    assert torch.allclose(back.log_ratio[0], torch.zeros_like(z), atol=1e-12)


@pytest.mark.parametrize("transition", [OverdampedLangevin(0.5), UnderdampedLangevin(0.5)])
@pytest.mark.parametrize("step_size", [0.05, 0.4])
def test_weights_of_tamed_chains_have_the_normaliser_as_their_mean(transition, step_size):
    """p is N(0.3, 0.2²), five times narrower than the base; Z = 1."""

    def narrow(z):
        return ((0.3 - z[0]) / 0.2**2,)

    z = torch.randn(200_000, 1, dtype=torch.float64)
    step = partial(transition, narrow, momentum_persistence=torch.tensor(0.8, dtype=torch.float64))
    beta = power_schedule(8, 1.0).double()
    last = anneal(step, initial_state(narrow, (z,), transition), beta, (torch.full((8, 1), step_size, dtype=torch.float64),))
    log_w = Normal(0.3, 0.2).log_prob(last.z[0]) - Normal(0.0, 1.0).log_prob(z) + last.log_ratio[0]
    w = log_w.exp()
    assert abs(w.mean() - 1.0) < 4.0 * w.std() / len(w) ** 0.5
    assert w.std() / len(w) ** 0.5 < 0.1


def test_tamed_drift_is_bounded_and_close_to_the_score_where_that_is_small():
    z, beta, eta = torch.tensor([[1e-3], [1.0], [1e30]]), torch.ones(()), (torch.tensor(0.1),)
    step = OverdampedLangevin(2.0)
    steep = lambda z: (-z[0],)  # noqa: E731
    moved = step(steep, initial_state(steep, (z,), step), (torch.zeros_like(z),), beta, eta, DAMPING).z[0]
    assert torch.allclose(moved[0], 0.9 * z[0], rtol=1e-6)
    assert ((moved - z)[:2].abs() < 2.0).all()
    assert torch.isfinite(moved).all()


@pytest.mark.parametrize("name", ["max_drift", "max_gradient"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bounds_of_drift_and_gradients_are_positive(name, value):
    with pytest.raises(ValueError, match=rf"expected a positive {name}, got .*; math.inf sets no bound"):
        UnderdampedLangevin(**{name: value})


def bound_and_gradient(transition, precision, scale=1.0):
    """Log weights of a chain to each of some Gaussian targets, and their gradients in the starts by a scaled loss."""
    torch.manual_seed(0)
    score = lambda z: (-precision * z[0],)  # noqa: E731
    z = torch.randn(len(precision), 1, dtype=torch.float64, requires_grad=True)
    step = partial(transition, score, momentum_persistence=DAMPING)
    last = anneal(step, initial_state(score, (z,), transition), torch.ones(8), (torch.full((8, 1), 0.5).double(),))
    log_w = -0.5 * precision * last.z[0].square() + 0.5 * z.square() + last.log_ratio[0]
    return log_w.detach(), torch.autograd.grad(scale * log_w.sum(), z)[0] / scale


@pytest.mark.parametrize("cls", [OverdampedLangevin, UnderdampedLangevin])
def test_gradients_of_unstable_chains_are_limited_and_their_values_are_not(cls):
    """Both dynamics are unstable at η = ½ and precision 40, and stable at precision 1."""
    precision = torch.tensor([1.0, 40.0], dtype=torch.float64).repeat(500)[:, None]
    limited, free = cls(), cls(max_gradient=math.inf)
    bound, gradient = bound_and_gradient(limited, precision)
    free_bound, free_gradient = bound_and_gradient(free, precision)
    assert torch.equal(bound, free_bound)
    assert torch.equal(gradient[::2], free_gradient[::2])
    assert free_gradient.abs().max() > 1e5
    assert gradient.abs().max() < 300.0
    scaled = bound_and_gradient(limited, precision, scale=1e-3)[1]
    assert torch.allclose(scaled, gradient)


@pytest.mark.parametrize("cls", [OverdampedLangevin, UnderdampedLangevin])
def test_a_loss_of_the_positions_alone_has_its_own_gradient(cls):
    z = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    gradients = []
    for transition in (cls(), cls(max_gradient=math.inf)):
        torch.manual_seed(0)
        step = partial(transition, score, momentum_persistence=DAMPING)
        start = z.expand(1, 2)
        last = anneal(step, initial_state(score, (start,), transition), torch.ones(3), (torch.full((3, 1), 0.1).double(),))
        gradients.append(torch.autograd.grad(100.0 * last.z[0].sum(), z)[0])
    assert gradients[0] != 0.0
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_a_chain_of_k_steps_evaluates_k_plus_one_scores(dynamics):
    calls = []

    def counting(z):
        calls.append(len(calls))
        return score(z)

    run(dynamics, 5, torch.randn(3, 2, dtype=torch.float64), score=counting)
    assert len(calls) == 6


def test_sites_of_a_state_do_not_mix():
    """A state of two sites moves as two states of one do under the same noise."""

    def score(z):
        return tuple(-3.0 * x for x in z)

    z, noise = torch.randn(2, 2, 4, 1, dtype=torch.float64).unbind(0)
    beta, eta = torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.1, 0.2], dtype=torch.float64)

    def moved(sites):
        state = initial_state(score, tuple(z[i] for i in sites), TRANSITIONS["overdamped"])
        return TRANSITIONS["overdamped"](
            score, state, tuple(noise[i] for i in sites), beta, tuple(eta[i] for i in sites), DAMPING
        )

    both = moved((0, 1))
    for i in (0, 1):
        alone = moved((i,))
        assert torch.equal(both.z[i], alone.z[0])
        assert torch.equal(both.log_ratio[i], alone.log_ratio[0])
        assert not torch.equal(both.z[i], z[i])


@pytest.mark.parametrize("schedule", [power_schedule(7, 1.0), power_schedule(7, 2.0), sigmoid_schedule(7)], ids=str)
def test_schedules_rise_to_exactly_one(schedule):
    assert (torch.cat([torch.zeros(1), schedule]).diff() > 0).all()
    assert schedule[-1] == 1.0


def test_learned_schedule_ends_at_one_whatever_the_increments():
    for _ in range(50):
        beta = increasing_schedule(torch.rand(13))
        assert beta[-1] == 1.0
        assert (beta.diff() > 0).all()


def test_sigmoid_schedule_is_symmetric():
    beta = torch.cat([torch.zeros(1), sigmoid_schedule(6)])
    assert torch.allclose(beta + beta.flip(0), torch.ones(7), atol=1e-6)
