"""Masks, scales and plates of a user's model: what counts in p counts in q, and what is undeclared is refused."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal, AutoNormalMessenger
from pyro.infer.reparam import LocScaleReparam

from pyro_lvgp.diagnostics import log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO, StructuredELBO, fit

pytestmark = pytest.mark.usefixtures("float64")
N = 12
SEEN = torch.arange(N) > 5
BOUNDS = [MeanFieldELBO("data", 3), ImportanceWeightedELBO("data", 3), StructuredELBO()]


def half_seen(y):
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y, obs_mask=SEEN)


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: type(bound).__name__)
def test_a_masked_latent_leaves_both_densities(bound):
    """Where q is the prior of what was not seen the bound is the evidence, whatever q says of what p leaves out."""
    y = torch.randn(N)
    guide = MeanFieldGuide(half_seen)
    guide(y[:, None] if isinstance(bound, StructuredELBO) else y)
    guide.locs.y_unobserved = torch.zeros(N)
    guide.scales.y_unobserved = torch.where(SEEN, 1e3, 1.0)
    evidence = dist.Normal(0.0, 1.0).log_prob(y[SEEN]).sum()
    assert bound.loss(half_seen, guide, y) == pytest.approx(-evidence.item())
    torch.testing.assert_close(log_weights(half_seen, guide, y, num_samples=5), evidence.expand(5))


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: type(bound).__name__)
def test_a_mask_of_the_distribution_counts_as_one_by_a_handler(bound):
    def model(y):
        with pyro.plate("data", N):
            x = pyro.sample("x", dist.Normal(0.0, 1.0).mask(SEEN))
            pyro.sample("y", dist.Normal(x, 1.0).mask(SEEN), obs=y)

    y, guide = torch.randn(N), MeanFieldGuide(model)
    guide(y[:, None] if isinstance(bound, StructuredELBO) else y)
    guide.locs.x, guide.scales.x = 0.5 * y, torch.where(SEEN, 0.5**0.5, 1e3)
    evidence = dist.Normal(0.0, 2.0**0.5).log_prob(y[SEEN]).sum()
    assert bound.loss(model, guide, y) == pytest.approx(-evidence.item())
    torch.testing.assert_close(log_weights(model, guide, y, num_samples=5), evidence.expand(5))


@pytest.mark.parametrize("prior", [dist.Normal, dist.LogNormal])
@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: type(bound).__name__)
def test_a_masked_latent_leaves_both_densities_of_an_auto_normal(bound, prior):
    def model(y):
        with pyro.plate("data", N):
            pyro.sample("y", prior(0.0, 1.0), obs=y, obs_mask=SEEN)

    y, guide = prior(0.0, 1.0).sample((N,)), AutoNormal(model)
    guide(y)
    guide.locs.y_unobserved, guide.scales.y_unobserved = torch.zeros(N), torch.where(SEEN, 9.0, 1.0)
    evidence = prior(0.0, 1.0).log_prob(y[SEEN]).sum()
    assert bound.loss(model, guide, y) == pytest.approx(-evidence.item())
    torch.testing.assert_close(log_weights(model, guide, y, num_samples=5), evidence.expand(5))


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: type(bound).__name__)
def test_data_observed_by_the_model_that_a_guide_runs_leave_no_density_in_q(bound):
    rows = torch.empty(4, dtype=torch.long)

    def model(y):
        with pyro.plate("data", N, subsample_size=4) as idx:
            rows.copy_(idx)
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[idx])

    y, guide = torch.randn(N), AutoNormalMessenger(model)
    guide(y)
    with torch.no_grad():
        guide.locs.x.copy_(0.5 * y)
    guide.scales.x = torch.full((N,), 0.5**0.5)
    loss = bound.loss(model, guide, y)
    evidence = dist.Normal(0.0, 2.0**0.5).log_prob(y[rows])
    assert loss == pytest.approx(-3.0 * evidence.sum().item())


def test_bounds_of_annealed_guides_stay_below_the_evidence():
    y = torch.randn(N)
    guide = AutoAnnealedLangevin(half_seen, local_plate="data", num_steps=2)
    guide(y)
    guide.base_guide.scales.y_unobserved = torch.where(SEEN, 1e3, 0.9)
    bounds = torch.tensor([-ImportanceWeightedELBO("data", 5).loss(half_seen, guide, y) for _ in range(100)])
    assert bounds.mean() < dist.Normal(0.0, 1.0).log_prob(y[SEEN]).sum() + 3.0 * bounds.std() / 10.0


def tempered(y):
    with poutine.scale(scale=0.1), pyro.plate("data", N):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def test_one_draw_is_the_ordinary_bound_where_the_model_alone_is_scaled():
    y = torch.randn(N)
    guide = MeanFieldGuide(tempered, init_scale=0.7)
    guide(y)
    losses = []
    for bound in (Trace_ELBO, partial(MeanFieldELBO, "data", 1), partial(ImportanceWeightedELBO, "data", 1)):
        torch.manual_seed(0)
        losses.append(bound(max_plate_nesting=1).loss(tempered, guide, y))
    assert losses == pytest.approx([losses[0]] * 3)


@pytest.mark.parametrize("num_samples", [1, 2, 3])
@pytest.mark.parametrize("bound", [MeanFieldELBO, ImportanceWeightedELBO])
def test_batch_dimensions_of_data_need_plates(bound, num_samples):
    """Two measurements of each datum in no plate of their own would be taken for draws."""

    def model(y):
        with pyro.plate("data", N):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    elbo, guide = bound("data", num_samples, max_plate_nesting=1), MeanFieldGuide(model)
    elbo.loss_and_grads(model, guide, torch.randn(N))
    with pytest.raises((ValueError, RuntimeError), match=r"a plate for each batch dimension of site 'y'|must match"):
        elbo.loss_and_grads(model, guide, torch.randn(2, N))


@pytest.mark.parametrize("bound", [MeanFieldELBO, ImportanceWeightedELBO])
def test_functions_of_draws_that_need_no_gradient_are_no_data(bound):
    """Deterministic and reparameterised sites, and values with missing ones drawn, have the draws of a held guide."""

    def model(y):
        with pyro.plate("data", N):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.deterministic("d", x.exp(), event_dim=0)
            pyro.sample("y", dist.Normal(x, 1.0), obs=y, obs_mask=SEEN)

    model, y = poutine.reparam(model, {"x": LocScaleReparam(0.0)}), torch.randn(N)
    elbo, guide = bound("data", 3, max_plate_nesting=1), MeanFieldGuide(model)
    losses = []
    for trained in (True, False):
        guide(y)
        guide.requires_grad_(trained)
        torch.manual_seed(0)
        losses.append(elbo.loss_and_grads(model, guide, y))
    assert losses[0] == pytest.approx(losses[1])


def test_residuals_may_be_observed():
    """A value that is a function of latents has their draws."""

    def model(y):
        with pyro.plate("data", N):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("residual", dist.Normal(0.0, 1.0), obs=y - x)

    def usual(y):
        with pyro.plate("data", N):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y, guide = torch.randn(N), MeanFieldGuide(model)
    guide(y)
    losses = []
    for either in (model, usual):
        torch.manual_seed(0)
        losses.append(MeanFieldELBO("data", 4).loss_and_grads(either, guide, y))
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("make", [MeanFieldGuide, AutoNormal, AutoAnnealedLangevin])
@pytest.mark.parametrize("loss", [None, TraceMeanField_ELBO()], ids=["default", "mean field"])
def test_a_fit_refuses_bounds_of_pyro_of_sites_that_the_model_alone_masks(make, loss):
    y, guide = torch.randn(N), make(half_seen)
    with pytest.raises(ValueError, match=r"mask alike.*y_unobserved.*pass loss=MeanFieldELBO\(\)"):
        fit(half_seen, guide, y, loss=loss, num_steps=1, progress=False)
    history = fit(half_seen, guide, y, loss=MeanFieldELBO(), num_steps=200, progress=False)
    evidence = dist.Normal(0.0, 1.0).log_prob(y[SEEN]).sum().item()
    assert -history.losses[-1] < evidence + 10.0  # with a probability of at least 1 − exp(−10)


def test_a_fit_takes_masks_of_model_and_guide():
    def guide(y):
        with pyro.plate("data", N), poutine.mask(mask=~SEEN):
            pyro.sample("y_unobserved", dist.Normal(pyro.param("loc", torch.zeros(N)), 1.0))

    y = torch.randn(N)
    history = fit(half_seen, guide, y, num_steps=1, progress=False)
    assert history.losses[0] == pytest.approx(-dist.Normal(0.0, 1.0).log_prob(y[SEEN]).sum().item())
