"""Numbers of tensor operations of a step, which its time grows with where models are small."""

import pyro
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


def test_a_step_of_a_mean_field_guide_takes_some_operations():
    count = operations(MeanFieldGuide)
    print(f"{count} operations")
    assert count <= 515
