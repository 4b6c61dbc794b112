"""Gradients and steps of every guide."""

import pyro
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pyro_lvgp.guides import AutoAnnealedLangevin
from tests.guides.conformance._guides import every_pair, loss_at, new, pairs_where, start, vectorised


def parameters(problem, guide):
    """Name, unconstrained value and constraint of every parameter in use, of guide and model."""
    for module in (guide, problem.model):
        for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
            for name, (constraint, _) in getattr(part, "_pyro_params", {}).items():
                # What a global guide draws, the base guide need not.
                given = path.startswith("base_guide.") and guide.global_guide is not None and name not in guide.annealed
                if not given:
                    yield f"{path}.{name}", getattr(part, f"{name}_unconstrained"), constraint


@every_pair
def test_every_parameter_gets_a_gradient(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    loss_at(problem, guide).backward()
    found = list(parameters(problem, guide))
    assert found
    for name, parameter, constraint in found:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        used = torch.ones_like(parameter)
        if constraint in (constraints.lower_cholesky, constraints.positive_definite):
            used = used.tril()
        assert torch.equal(parameter.grad != 0.0, used.bool()), name


@pairs_where(lambda entry, model: entry.exact_gradient)
def test_gradient_is_the_slope_of_the_loss(guide_id, model_id, monkeypatch):
    problem, guide = start(guide_id, model_id, torch.float64)
    if isinstance(guide, AutoAnnealedLangevin):
        monkeypatch.setattr(guide, "base_weight", 0.0)  # the gradient of the base's own bound is not one of the loss
    values = [value for _, value, _ in parameters(problem, guide)]
    slopes = parameters_to_vector(torch.autograd.grad(loss_at(problem, guide), values))
    start_at = parameters_to_vector(values).detach()
    direction, ends = torch.randn_like(start_at), []
    for step in (-1e-5, 1e-5):
        vector_to_parameters(start_at + step * direction, values)
        ends.append(loss_at(problem, guide).detach())
    torch.testing.assert_close(slopes @ direction, (ends[1] - ends[0]) / 2e-5, rtol=1e-5, atol=1e-5)


@every_pair
@pytest.mark.parametrize("local_params", [False, True], ids=["param-store", "module-local"])
def test_step_moves_every_parameter(guide_id, model_id, local_params):
    with pyro.settings.context(module_local_params=local_params):
        problem, guide = (new if local_params else start)(guide_id, model_id)
        before = {name: value.detach().clone() for name, value, _ in parameters(problem, guide)}
        SVI(problem.model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(*problem.args)
        assert before
        for name, value, _ in parameters(problem, guide):
            assert not torch.equal(before[name], value), name


@pairs_where(lambda entry, model: model == "global")
def test_fit_improves_the_bound(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    before = vectorised(problem).loss(problem.model, guide, *problem.args)
    svi = SVI(problem.model, guide, Adam({"lr": 0.2}), vectorised(problem, num_particles=5))
    for _ in range(12):
        svi.step(*problem.args)
    after = vectorised(problem).loss(problem.model, guide, *problem.args)
    assert after < before - 10.0
