"""Guides with learned reverse kernels."""

import math

import pyro
import pytest
import torch
from pyro import poutine

from pyro_lvgp.diagnostics import bound_sandwich
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS, OverdampedLangevin, State, Transition, UnderdampedLangevin
from pyro_lvgp.infer import _compiled_loop, load, save
from pyro_lvgp.models import BayesianGPLVM
from tests.guides.annealed.guide._models import LOSSES, assert_paths_agree, value_and_gradients
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")
DYNAMICS = list(TRANSITIONS)


def perturb(guide, scale=0.2):
    """Give the kernels of a guide random coefficients."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for x in guide.reverse_kernels.parameters():
            x.copy_(scale * torch.randn(x.shape, generator=generator, dtype=x.dtype))


def make_guide(model, Y, dynamics="underdamped", *, perturbed=True, **kwargs):
    pyro.clear_param_store()
    guide = AutoAnnealedLangevin(model, num_steps=3, dynamics=dynamics, step_size=0.2, **kwargs)
    torch.manual_seed(4)
    guide(Y)
    if perturbed and kwargs.get("learn_reverse"):
        perturb(guide)
    return guide


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_first_bound_is_that_of_plain_annealing(dynamics, loss):
    model, Y = small()
    values = []
    for learn_reverse in (False, True):
        guide = make_guide(model, Y, dynamics, perturbed=False, learn_reverse=learn_reverse)
        torch.manual_seed(5)
        values.append(LOSSES[loss]().differentiable_loss(model, guide, Y).detach())
    torch.testing.assert_close(values[1], values[0], rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("loss", ["drawn", "integrated", "weighted"])
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_traced_and_pure_paths_agree(dynamics, loss):
    def make(target):
        guide = AutoAnnealedLangevin(target, num_steps=3, dynamics=dynamics, step_size=0.2, learn_reverse=True)
        guide(Y)
        perturb(guide)
        return guide

    model, Y = small()
    assert_paths_agree(make, model, Y, LOSSES[loss](), Y)


@pytest.mark.parametrize("dynamics", ["overdamped", "underdamped"])
def test_compiled_transitions_are_the_eager_ones(monkeypatch, dynamics):
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph)
    model, Y = small()
    found = []
    for compile in (False, True):
        guide = make_guide(model, Y, dynamics, learn_reverse=True, compile=compile)
        for _ in range(2):  # the first is not compiled
            result = value_and_gradients(model, guide, LOSSES["drawn"](), Y)
        found.append(result)
    torch.testing.assert_close(found[1], found[0], rtol=1e-7, atol=1e-9)


def conjugate(y):
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
        pyro.sample("y", pyro.distributions.Normal(x, 0.5), obs=y)


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_weights_are_unbiased_in_both_directions_for_random_kernels(dynamics):
    y, base = torch.tensor([0.8]), MeanFieldGuide(conjugate, init_scale=1.0)
    guide = make_guide(conjugate, y, dynamics, learn_reverse=True, local_plate="data", base_guide=base)
    log_z = torch.distributions.Normal(0.0, 1.25**0.5).log_prob(y)[0]
    num, errors = 40_000, []
    posterior_std = (1.0 / 5.0) ** 0.5
    with torch.no_grad():
        for reverse in (False, True):
            with pyro.plate("draws", num, dim=-2):
                latents = {"x": 0.8 * 0.8 + posterior_std * torch.randn(num, 1)}
                run = guide.reverse(latents) if reverse else guide
                trace = poutine.trace(run).get_trace(y)
                model = poutine.trace(poutine.replay(conjugate, trace)).get_trace(y)
            trace.compute_log_prob()
            model.compute_log_prob()
            log_w = sum(model.nodes[n]["log_prob"].reshape(-1) for n in ("x", "y")) - trace.nodes["x"]["log_prob"].reshape(-1)
            w = (log_w - log_z if not reverse else log_z - log_w).exp()
            assert len(w) == num
            errors.append((w.mean() - 1.0) / (w.std() / num**0.5))
            assert w.std() / num**0.5 < 0.05
            assert log_w.std() > 0.01
    assert max(map(abs, errors)) < 4.0


@pytest.mark.parametrize("dynamics", [OverdampedLangevin(math.inf), UnderdampedLangevin(math.inf)])
def test_gradient_is_that_of_finite_differences(dynamics):
    y = torch.tensor([0.8, -0.3])
    guide = make_guide(conjugate, y, dynamics, learn_reverse=True, local_plate="data", base_weight=0.0)
    guide.transition.max_gradient = math.inf

    def value():
        torch.manual_seed(5)
        return LOSSES["drawn"]().differentiable_loss(conjugate, guide, y)

    parameters = list(guide.parameters())
    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    assert all(g is not None for g in gradients)
    checked = 0
    for p, g in zip(parameters, gradients, strict=True):
        for i in range(p.numel()):
            values = []
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    p.view(-1)[i] += sign * 1e-6
                    values.append(value())
                    p.view(-1)[i] -= sign * 1e-6
            assert (values[0] - values[1]).item() / 2e-6 == pytest.approx(g.reshape(-1)[i].item(), rel=1e-5, abs=1e-7)
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_sandwich_holds_the_evidence(dynamics):
    torch.manual_seed(2)
    y, base = 1.25**0.5 * torch.randn(2000), MeanFieldGuide(conjugate, init_scale=1.0)
    guide = make_guide(conjugate, y, dynamics, learn_reverse=True, local_plate="data", base_guide=base)
    latents = {"x": 0.8 * y + 0.2**0.5 * torch.randn(2000)}
    evidence = torch.distributions.Normal(0.0, 1.25**0.5).log_prob(y)
    sandwich = bound_sandwich(conjugate, guide, y, latents=latents, num_samples=1)
    lower, upper = sandwich.lower - evidence, sandwich.upper - evidence
    assert lower.mean() < -4.0 * lower.std() / 2000**0.5
    assert upper.mean() > 4.0 * upper.std() / 2000**0.5


def test_saved_guides_are_those_that_are_loaded(tmp_path):
    model, Y = small()
    assert isinstance(model, BayesianGPLVM)
    guide = make_guide(model, Y, learn_reverse=True)
    save(tmp_path / "guide.safetensors", model, guide)
    loaded_model, loaded = load(tmp_path / "guide.safetensors")
    values = []
    for m, g in ((model, guide), (loaded_model, loaded)):
        torch.manual_seed(5)
        values.append(LOSSES["drawn"]().differentiable_loss(m, g, Y))
    assert torch.equal(*values)
    assert loaded.momentum_persistence.shape == (3,)


def test_transitions_without_momentum_units_are_refused():
    class Still(Transition):
        def __call__(self, score, state, noise, beta, step_size, momentum_persistence):
            return State(state.z, state.score, (), state.log_ratio)

    with pytest.raises(ValueError, match=r"expected an OverdampedLangevin or UnderdampedLangevin .* got Still"):
        AutoAnnealedLangevin(conjugate, dynamics=Still(), learn_reverse=True)
