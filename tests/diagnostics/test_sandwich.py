"""Lower and upper bounds of the evidence at latents from the model."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp.diagnostics import bound_sandwich, log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


def test_sandwich_holds_the_evidence_and_closes_with_longer_chains():
    def model(y):
        with pyro.plate("data", 400):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(2.0 * x, 0.5), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x = (truth.nodes[name]["value"] for name in ("y", "x"))
    evidence = dist.Normal(0.0, 4.25**0.5).log_prob(y).mean()
    gaps = []
    for num_steps in (4, 16, 64):
        pyro.clear_param_store()
        base = MeanFieldGuide(model, init_scale=1.0)
        guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=num_steps, base_guide=base, step_size=0.05)
        sandwich = bound_sandwich(model, guide, y, latents={"x": x}, num_samples=1)
        assert sandwich.lower.mean() < evidence < sandwich.upper.mean()
        gaps.append(sandwich.gap.mean())
    assert gaps[0] > 1.3 * gaps[1] > 1.3**2 * gaps[2]  # 1.4 to 2.4 over seeds


def test_sandwich_of_a_mini_batch():
    def model(y, idx=None):
        with pyro.plate("data", 400, subsample=idx):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(2.0 * x, 2.0), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x = (truth.nodes[name]["value"] for name in ("y", "x"))
    base = MeanFieldGuide(model, init_scale=1.0, create_plates=lambda y, idx=None: pyro.plate("data", 400, subsample=idx))
    guide = AutoAnnealedLangevin(model, local_plate="data", base_guide=base, step_size=0.05)
    guide(y)
    with torch.no_grad():
        base.locs.x.copy_(torch.linspace(-1.0, 1.0, 400))
    # Rows, and a base that is not the same for all: weights of a mini-batch are those of its rows among all.
    idx = torch.arange(0, 400, 2)
    every, some = (
        bound_sandwich(model, guide, y[rows], rows, latents={"x": x[rows]}, num_samples=2000)
        for rows in (torch.arange(400), idx)
    )
    assert some.lower.shape == (200,)
    for one, other in ((some.lower, every.lower), (some.upper, every.upper)):
        assert (one - other[idx]).abs().mean() < 0.05 < (one - other[idx - 10]).abs().mean()
    with pytest.raises(ValueError, match=r"value of site 'x' of shape \[200\] .*got \[400\]; with a mini-batch"):
        bound_sandwich(model, guide, y[idx], idx, latents={"x": x})


def test_sandwich_of_another_guide_is_refused(unchecked):
    model, Y = small()
    with pytest.raises(TypeError, match=r"expected an AutoAnnealedLangevin.*got MeanFieldGuide"):
        bound_sandwich(model, MeanFieldGuide(model), Y, latents={})


def test_sandwich_holds_globals_at_their_true_values():
    model, _ = small()
    model.likelihood_term = "fitc"
    truth = poutine.trace(model).get_trace()
    y, u, X = (truth.nodes[name]["value"] for name in ("y", "u", "X"))
    guide = AutoAnnealedLangevin(model, num_steps=20, base_guide=MeanFieldGuide(model, init_scale=1.0), step_size=0.02)
    sandwich = bound_sandwich(model, guide, y, latents={"u": u, "X": X}, num_samples=50)
    assert sandwich.lower.shape == (8,)
    assert sandwich.lower.mean() < sandwich.upper.mean()
    with pytest.raises(ValueError, match="got none for \\['u'\\]"):
        bound_sandwich(model, guide, y, latents={"X": X})
    model.likelihood_term = "svgp"
    with pytest.raises(ValueError, match='whose density is that of its draws, got likelihood_term="svgp"'):
        bound_sandwich(model, guide, y, latents={"u": u, "X": X})


@pytest.mark.parametrize("plate", ["data", None])
def test_a_sandwich_is_of_the_evidence_given_sites_that_are_held(plate):
    def model(y):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(5.0, 0.1))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(x + z, 1.0), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x, z = (truth.nodes[name]["value"] for name in ("y", "x", "z"))
    guide = AutoAnnealedLangevin(model, local_plate=plate, sites=["x"], num_steps=2, step_size=0.01)
    guide(y)
    guide.base_guide.locs.x, guide.base_guide.scales.x = 0.5 * (y - z), torch.full((3,), 0.5**0.5)
    sandwich = bound_sandwich(model, guide, y, latents={"x": x, "z": z}, num_samples=20)
    evidence = dist.Normal(z, 2.0**0.5).log_prob(y)
    for side in (sandwich.lower, sandwich.upper):
        torch.testing.assert_close(side, evidence if plate else evidence.sum(), atol=0.01, rtol=0.0)


@pytest.mark.parametrize("plate", ["data", None])
def test_a_sandwich_of_a_model_for_one_draw_at_a_time(plate):
    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0))
            return pyro.sample("y", dist.Normal(x.reshape(3), 1.0), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x = (truth.nodes[name]["value"] for name in ("y", "x"))
    base = MeanFieldGuide(model)  # in the coordinates of the sites, not of a preconditioner
    guide = AutoAnnealedLangevin(model, local_plate=plate, num_steps=2, base_guide=base, step_size=0.01)
    guide(y)
    base.locs.x, base.scales.x = 0.5 * y, torch.full((3,), 0.5**0.5)
    with pytest.raises(RuntimeError):
        bound_sandwich(model, guide, y, latents={"x": x}, num_samples=20)
    sandwich = bound_sandwich(model, guide, y, latents={"x": x}, num_samples=20, vectorize=False)
    evidence = dist.Normal(0.0, 2.0**0.5).log_prob(y)
    for side in (sandwich.lower, sandwich.upper):
        torch.testing.assert_close(side, evidence if plate else evidence.sum(), atol=0.01, rtol=0.0)
    assert log_weights(model, guide, y, num_samples=7, vectorize=False).shape == ((7, 3) if plate else (7,))


@pytest.mark.parametrize(
    ("what", "mask", "own_mask"),
    [
        ("a factor", True, True),
        ("a scale", True, True),
        ("a masked latent", torch.arange(3) > 0, True),
        ("a masked latent", False, True),
        ("a masked latent", True, torch.arange(3) > 0),
    ],
)
def test_a_sandwich_needs_a_density_of_draws(what, mask, own_mask):
    def model(y):
        with pyro.plate("data", 3):
            with poutine.mask(mask=mask), poutine.scale(scale=0.5 if what == "a scale" else 1.0):
                x = pyro.sample("x", dist.Normal(0.0, 1.0).mask(own_mask))
            if what == "a factor":
                pyro.factor("penalty", -x.square())
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    with pytest.raises(ValueError, match=f"expected a model whose density is that of its draws, got {what} at site"):
        bound_sandwich(model, guide, torch.zeros(3), latents={"x": torch.zeros(3)})
