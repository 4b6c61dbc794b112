"""Bounds of the annealed guide with nothing set, where the evidence is known."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.importance import vectorized_importance_weights

from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import JointAdam, fit
from tests.guides.annealed.guide._models import standard_error


def evidence(features, y, prior_scale, noise):
    covariance = prior_scale**2 * features @ features.mT + noise**2 * torch.eye(len(y))
    return dist.MultivariateNormal(torch.zeros(len(y)), covariance).log_prob(y)


@pytest.mark.parametrize(("distance", "dtype"), [(1.0, torch.float64), (1e3, torch.float32)])
def test_bound_of_a_linear_regression_is_its_evidence_before_and_after_a_fit(distance, dtype):
    """Whatever the distance and the correlation of its weights: two nearly equal features."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    first = torch.randn(300)
    features = torch.stack([torch.ones(300), first, first + 0.01 * torch.randn(300)], -1)
    y = features @ torch.tensor([distance, 2.0, -1.0]) + 0.5 * torch.randn(300)

    def model():
        weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1e3).to_event(1))
        with pyro.plate("rows", 300):
            pyro.sample("y", dist.Normal((weights * features).sum(-1), 0.5), obs=y)

    exact = evidence(features.double(), y.double(), 1e3, 0.5)
    guide = AutoAnnealedLangevin(model)
    for num_steps in (0, 50):
        if num_steps:
            fit(model, guide, num_steps=num_steps, optim=JointAdam(lr=0.02), progress=False)
        values = vectorized_importance_weights(model, guide, num_samples=100, max_plate_nesting=1)[0].detach()
        assert -0.5 < values.mean() - exact < 4.0 * standard_error(values) + 0.01
