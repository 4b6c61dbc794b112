"""Posterior draws, quantiles and predictions."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import ZeroImputation
from tests.guides.annealed.guide._models import hierarchy
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


def test_predictions_without_the_data_are_told_how_to_predict():
    def model(y=None):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide, y = AutoAnnealedLangevin(model, local_plate="data", num_steps=2), torch.randn(3)
    guide(y)
    with pytest.raises(ValueError, match=r"got 'y', .* predictions too: Predictive\(model, guide\.sample_posterior\("):
        Predictive(model, guide=guide, num_samples=4)()
    assert Predictive(model, guide.sample_posterior(4, y))()["y"].shape == (4, 3)


@pytest.mark.parametrize(("dynamics", "step_size"), [("overdamped", 0.02), ("underdamped", 0.2)])
def test_posterior_draws_have_the_moments_of_the_posterior(dynamics, step_size):
    """A Gaussian model whose posterior is N(0.8 y / 2, 0.2) for each row; long chains from a poor base."""

    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(2.0 * x, 1.0), obs=y)

    y = torch.tensor([-2.0, 0.0, 3.0])
    base = MeanFieldGuide(model, init_scale=1.0)
    chain = {"num_steps": 200, "dynamics": dynamics, "step_size": step_size}
    guide = AutoAnnealedLangevin(model, local_plate="data", base_guide=base, **chain)
    x = guide.sample_posterior(10_000, y, chunk_size=10_000)["x"]
    assert torch.allclose(x.mean(0), 0.4 * y, atol=0.03)
    assert torch.allclose(x.std(0), torch.full((3,), 0.2**0.5), rtol=0.06)


@pytest.mark.parametrize(
    ("num_samples", "chunk_size", "error", "message"),
    [
        (0, 1, ValueError, "expected num_samples of 1 or more, got 0"),
        (2.5, 1, TypeError, r"expected num_samples to be an integer, got 2\.5"),
        (2, 0, ValueError, "expected chunk_size of 1 or more, got 0"),
    ],
)
def test_numbers_of_draws_are_checked(unchecked, num_samples, chunk_size, error, message):
    model, Y = small(torch.float32)
    guide = AutoAnnealedLangevin(model, num_steps=2)
    with pytest.raises(error, match=message):
        guide.sample_posterior(num_samples, Y, chunk_size=chunk_size)


def test_median_and_quantiles_are_those_of_the_draws():
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=2)
    guide(Y)
    torch.manual_seed(7)
    draws = guide.sample_posterior(30, Y)
    quantiles = guide.quantiles([0.1, 0.5], Y, num_samples=30, seed=7)
    for name, shape in {"u": (3, 4), "X": (8, 2)}.items():
        assert draws[name].shape == (30, *shape)
        assert quantiles[name].shape == (2, *shape)
        assert torch.equal(quantiles[name], draws[name].quantile(torch.tensor([0.1, 0.5]), dim=0))
        assert torch.equal(guide.median(Y, num_samples=30, seed=7)[name], quantiles[name][1])
    assert guide.sample_posterior(30, Y, chunk_size=20)["X"].shape == (30, 8, 2)
    one_by_one = guide.sample_posterior(30, Y, vectorize=False)
    assert one_by_one["X"].shape == (30, 8, 2)
    assert torch.allclose(one_by_one["X"].mean(0), draws["X"].mean(0), atol=0.3)


def test_draws_reach_prediction_and_new_rows():
    """What models do with a guide they do with this one."""
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=3)
    guide(Y)
    assert model.reconstruct(guide, Y, num_samples=4).mean.shape == (8, 3)
    filled = model.impute(guide, Y, num_samples=4).mean
    assert torch.equal(filled[~torch.isnan(Y)], Y[~torch.isnan(Y)])
    assert model.infer_latents(guide, Y[:2], num_steps=5).mean.shape == (2, 2)


@pytest.mark.parametrize("bound", [MeanFieldELBO, ImportanceWeightedELBO])
def test_draws_of_some_sites_again_are_refused_where_all_have_one_weight(bound):
    y, guide = torch.randn(5), AutoAnnealedLangevin(hierarchy, num_steps=2)
    with pytest.raises(
        ValueError, match=r"as many draws of each annealed site, got \[1, 3\]: .* take num_samples=1 or Trace_ELBO"
    ):
        bound(num_samples=3).loss(hierarchy, guide, y)
    assert math.isfinite(bound(num_samples=1).loss(hierarchy, guide, y))
    assert math.isfinite(Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1).loss(hierarchy, guide, y))


def test_the_start_of_a_chain_has_a_name_of_its_own():
    def model(y):
        with pyro.plate("data", len(y)):
            scale = pyro.sample("x_noise", dist.LogNormal(0.0, 1.0))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, scale), obs=y)

    y, guide = torch.randn(3), AutoAnnealedLangevin(model, local_plate="data", sites=["x"], num_steps=1)
    guide(y)
    known = poutine.condition(guide, {"x_noise": torch.ones(3)})
    assert not torch.allclose(known(y)["x"], known(y)["x"])


def test_inferred_latents_start_at_the_encoding_of_the_base():
    Y = torch.randn(6, 3)
    model = BayesianGPLVM(6, 3, 2, num_inducing=3).initialize(Y)
    base = MeanFieldGuide(model, encoders={"X": ZeroImputation(3, 2, (4,))})
    guide = AutoAnnealedLangevin(model, num_steps=1, base_guide=base)
    guide(Y)
    loc, scale = base.encoders.X(Y)
    found = model.infer_latents(guide, Y, num_steps=0)
    torch.testing.assert_close(found.mean, loc)
    torch.testing.assert_close(found.variance.sqrt(), scale)
