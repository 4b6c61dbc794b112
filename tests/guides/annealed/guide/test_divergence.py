"""Chains that diverge."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import UnderdampedLangevin
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM

pytestmark = pytest.mark.usefixtures("float64")


def steep_counts(y, rate=1.0):
    """Log rates whose posteriors are narrow."""
    with pyro.plate("data", 4):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson(rate * (8.0 * x).exp()), obs=y)


def targets_that_diverge(traced):
    """Arguments, model and options of chains that explode without taming."""
    if traced:
        return (torch.full((4,), 3000.0),), steep_counts, {"local_plate": "data", "base_guide": MeanFieldGuide(steep_counts)}
    model = BayesianGPLVM(10, 3, 2, Linear(2), num_inducing=3, likelihood=Gaussian(1e-12))
    return (torch.randn(10, 3),), model, {"num_steps": 80, "base_guide": MeanFieldGuide(model)}


@pytest.mark.parametrize("traced", [True, False])
def test_tamed_chains_stay_finite(traced):
    args, model, options = targets_that_diverge(traced)
    assert all(torch.isfinite(x).all() for x in AutoAnnealedLangevin(model, **options)(*args).values())


@pytest.mark.parametrize("traced", [True, False])
def test_chains_that_diverge_halve_their_step_sizes_and_say_so(traced):
    args, model, options = targets_that_diverge(traced)
    guide = AutoAnnealedLangevin(model, dynamics=UnderdampedLangevin(math.inf), step_size=0.4, **options)
    with pytest.warns(RuntimeWarning, match=r"a chain diverged, and all step sizes .* were halved"):
        drawn = guide(*args)
    assert torch.isfinite(drawn["x" if traced else "X"]).all()
    sizes = guide.step_sizes.x if traced else guide.step_sizes.X
    halvings = torch.log2(0.4 / sizes)
    assert (halvings >= 0.99).all()
    assert torch.allclose(halvings, halvings.round(), atol=1e-6)


def test_chains_without_a_finite_score_say_so():
    def nowhere(y):
        with pyro.plate("data", 4):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.factor("f", torch.where(x > 100.0, (x - 100.0).sqrt(), 0.0))  # a gradient that is NaN where the value is 0

    guide = AutoAnnealedLangevin(nowhere, local_plate="data", step_size=0.1)
    with (
        pytest.warns(RuntimeWarning, match="were halved"),
        pytest.raises(ValueError, match=r"a chain that stays finite, got NaN.* make step_size smaller"),
    ):
        guide(torch.zeros(4))


def test_errors_of_models_are_theirs_where_chains_are_finite():
    guide = AutoAnnealedLangevin(steep_counts, local_plate="data", num_steps=2, step_size=1e-6)
    guide(torch.ones(4))
    with pytest.raises(ValueError, match=r"Expected parameter rate"):
        guide(torch.ones(4), -1.0)
