"""Numbers of tensor operations of a step, which its time grows with where models are small."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp._compile.recording import CountOperations
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM


def operations(make_guide):
    """Operations of a step, forward and backward, after those of the first step, which prepare it."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    Y = torch.randn(30, 4)
    model = BayesianGPLVM(30, 4, 2, num_inducing=6).initialize(Y)
    guide, bound = make_guide(model), MeanFieldELBO(num_samples=1, max_plate_nesting=1)
    with pyro.validation_enabled(False):
        bound.loss_and_grads(model, guide, Y)
        with CountOperations() as counted:
            bound.loss_and_grads(model, guide, Y)
    return counted.total


@pytest.mark.parametrize(("dynamics", "most"), [("underdamped", 83), ("overdamped", 80)])
def test_a_transition_takes_some_operations_forward_and_backward(dynamics, most):
    short, long = (operations(lambda model, K=K: AutoAnnealedLangevin(model, num_steps=K, dynamics=dynamics)) for K in (5, 10))
    each = (long - short) / 5
    print(f"{short} operations with 5 transitions, {each:g} for each transition")
    assert each <= most


@pytest.mark.parametrize(("dynamics", "most"), [("underdamped", 155), ("overdamped", 152)])
def test_a_transition_of_a_traced_model_takes_some_operations(dynamics, most):
    """Of a logistic model, whose scores have derivatives by autograd."""
    y, W = torch.ones(6, 3), torch.randn(2, 3)

    def model(y):
        offset = pyro.sample("offset", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", 6):
            x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Bernoulli(logits=x @ W - offset).to_event(1), obs=y)

    def count(num_steps):
        pyro.clear_param_store()
        guide = AutoAnnealedLangevin(model, local_plate="rows", num_steps=num_steps, dynamics=dynamics, step_size=0.1)
        guide(y)
        loss, parameters = MeanFieldELBO(max_plate_nesting=1), list(guide.parameters())
        with pyro.validation_enabled(False), CountOperations() as counted:
            torch.autograd.grad(loss.differentiable_loss(model, guide, y), parameters)
        return counted.total

    each = count(2) - count(1)
    print(f"{each} operations for each transition")
    assert each <= most


def test_a_step_of_a_mean_field_guide_takes_some_operations():
    count = operations(MeanFieldGuide)
    print(f"{count} operations")
    assert count <= 515
