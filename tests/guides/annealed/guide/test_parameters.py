"""Annealing schedules and step sizes, fixed and learned."""

import pytest
import torch

from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.guides.annealed.schedules import power_schedule, sigmoid_schedule
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("schedule", "beta"),
    [("linear", power_schedule(4, 1.0)), (2.0, power_schedule(4, 2.0)), ("sigmoid", sigmoid_schedule(4))],
    ids=["linear", "power", "sigmoid"],
)
def test_fixed_schedules_and_step_sizes_are_buffers(schedule, beta):
    model, Y = small(torch.float32)
    guide = AutoAnnealedLangevin(model, num_steps=4, annealing_schedule=schedule, learn_step_size=False)
    guide(Y)
    learned = {name for name, _ in guide.named_parameters()}
    assert not any("step_sizes" in name or "increments" in name for name in learned)
    assert torch.equal(guide.beta, beta)
    buffers = dict(guide.double().named_buffers())
    assert buffers["beta"].dtype == buffers["step_sizes.X"].dtype == torch.float64


def test_learned_schedules_and_step_sizes_are_parameters_within_their_bounds():
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=4, dynamics="underdamped", step_size=0.3, max_step_size=0.5)
    guide(Y)
    assert torch.allclose(guide.step_sizes.X, torch.full((4, 2), 0.3))
    with torch.no_grad():
        guide.step_sizes.X_unconstrained += 100.0
    assert guide.step_sizes.X.max() <= 0.5
    assert torch.equal(guide.increments, torch.ones(4))
    assert guide.momentum_persistence.item() == pytest.approx(0.8)
