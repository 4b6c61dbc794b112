"""Compiled against eager transitions of the annealed guide: values, gradients, number of graphs, and in a compiled bound."""

import pyro
import torch

from pyro_lvgp.annealing import STEPS
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import CompiledELBO, MeanFieldELBO
from pyro_lvgp.likelihoods import Bernoulli
from pyro_lvgp.models import BayesianGPLVM


def value_and_gradients(model, guide, Y):
    torch.manual_seed(5)
    loss = MeanFieldELBO(max_plate_nesting=1).differentiable_loss(model, guide, Y)
    return loss, torch.autograd.grad(loss, [*model.parameters(), *guide.parameters()])


def compare(model, Y, num_steps, dynamics):
    """The number of graphs compiled for a chain."""
    results = []
    for compile in (False, True):
        pyro.clear_param_store()
        torch.manual_seed(4)
        guide = AutoAnnealedLangevin(model, num_steps=num_steps, dynamics=dynamics, compile=compile)
        guide._setup_prototype(Y)
        torch._dynamo.utils.counters.clear()
        results.append(value_and_gradients(model, guide, Y))
    (eager, eager_gradients), (compiled, compiled_gradients) = results
    assert torch.allclose(compiled, eager, rtol=1e-10), (compiled, eager)
    for a, b in zip(compiled_gradients, eager_gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), (a, b)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_recorded_as_part_of_the_whole(model, Y):
    pyro.clear_param_store()
    guide = AutoAnnealedLangevin(model, num_steps=2, compile=True)
    bound = MeanFieldELBO(max_plate_nesting=1)
    whole = CompiledELBO(bound, backend="eager")
    whole.loss_and_grads(model, guide, Y)
    losses = []
    for loss in (bound, whole):
        torch.manual_seed(5)
        losses.append(loss.loss_and_grads(model, guide, Y))
    assert abs(losses[0] - losses[1]) < 1e-9 * abs(losses[0]), losses


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    Y = torch.randn(8, 3)
    Y[2, 1] = torch.nan
    model = BayesianGPLVM(8, 3, 2, num_inducing=4).initialize(Y)
    graphs = [compare(model, Y, num_steps, "overdamped") for num_steps in (2, 6)]
    # The first transition starts at noise without a history, the others where a gradient passes: two graphs at most.
    assert 1 <= graphs[0] <= 2, graphs
    assert graphs[0] == graphs[1], graphs
    # By quadrature, whose gradient autograd takes.
    pyro.clear_param_store()
    binary = BayesianGPLVM(8, 3, 2, num_inducing=4, likelihood=Bernoulli()).initialize((Y > 0.0).double())
    assert compare(binary, (Y > 0.0).double(), 2, "underdamped") == graphs[0]
    assert set(STEPS) == {"overdamped", "underdamped"}
    assert_recorded_as_part_of_the_whole(model, Y)
