"""Chains that diverge."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM

pytestmark = pytest.mark.usefixtures("float64")


def steep_counts(y, rate=1.0):
    """Log rates whose posteriors are narrow."""
    with pyro.plate("data", 4):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson(rate * (8.0 * x).exp()), obs=y)


@pytest.mark.parametrize("traced", [True, False])
def test_chains_that_diverge_say_so(traced):
    if traced:
        args, guide = (torch.full((4,), 3000.0),), AutoAnnealedLangevin(steep_counts, local_plate="data")
    else:
        args = (torch.randn(10, 3),)
        model = BayesianGPLVM(10, 3, 2, Linear(2), num_inducing=3, likelihood=Gaussian(1e-12))
        guide = AutoAnnealedLangevin(model, num_steps=40)
    with pytest.raises(ValueError, match=r"a chain that stays finite, got NaN.* make step_size smaller"):
        guide(*args)


def test_errors_of_models_are_theirs_where_chains_are_finite():
    guide = AutoAnnealedLangevin(steep_counts, local_plate="data", num_steps=2, step_size=1e-6)
    guide(torch.ones(4))
    with pytest.raises(ValueError, match=r"Expected parameter rate"):
        guide(torch.ones(4), -1.0)
