"""Gain of the bound by chains, datum by datum."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.diagnostics import chain_gain
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import UnderdampedLangevin

pytestmark = pytest.mark.usefixtures("float64")
SCALES = torch.tensor([1.0, 1.0, 0.01, 1.0, 0.02])


def model(y):
    with pyro.plate("data", 5):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, SCALES), obs=y)


def make_guide(**options):
    return AutoAnnealedLangevin(
        model, local_plate="data", base_guide=MeanFieldGuide(model, init_scale=0.7), num_steps=4, **options
    )


def test_rows_that_are_too_narrow_for_the_step_size_are_named_worst_first():
    guide = make_guide(step_size=0.4, dynamics=UnderdampedLangevin(math.inf), base_weight=0.0)
    gain = chain_gain(model, guide, torch.zeros(5), num_samples=300)
    assert gain.worse.tolist() == [2, 4]
    assert (gain.value[[2, 4]] < 0.0).all()


def test_gain_is_the_difference_of_the_bounds_with_its_standard_error():
    """Base N(0, 0.7²) of a posterior N(0, ½): the bound of the base in closed form, that of the chain between it and log Z."""
    guide = make_guide(step_size=0.1)
    gain = chain_gain(model, guide, torch.zeros(5), num_samples=4000)
    log_z = dist.Normal(0.0, math.sqrt(2.0)).log_prob(torch.tensor(0.0))
    v = 0.49
    base = (
        -0.5 * math.log(2 * math.pi)
        - 0.5 * v
        - 0.5 * math.log(2 * math.pi)
        - 0.5 * v
        + 0.5 * math.log(2 * math.pi * math.e * v)
    )
    room = log_z - base
    assert (gain.value[[0, 1, 3]] < room + 4.0 * gain.standard_error[[0, 1, 3]]).all()
    assert (gain.value[[0, 1, 3]] > -4.0 * gain.standard_error[[0, 1, 3]]).all()
    again = chain_gain(model, guide, torch.zeros(5), num_samples=4000, seed=1)
    error = torch.hypot(gain.standard_error, again.standard_error)
    assert ((gain.value - again.value).abs() < 4.5 * error).all()


def test_joint_chains_have_one_gain():
    gain = chain_gain(model, AutoAnnealedLangevin(model), torch.zeros(5), num_samples=20)
    assert gain.value.shape == ()
    assert len(gain.worse) <= 1


@pytest.mark.usefixtures("unchecked")
def test_other_guides_are_refused():
    with pytest.raises(TypeError, match=r"expected an AutoAnnealedLangevin, .* got MeanFieldGuide"):
        chain_gain(model, MeanFieldGuide(model), torch.zeros(5))
