"""Priors on the parameters of the model."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.models import RandomFeatureLVM
from tests.helpers.particles import assert_particles_are_those_one_by_one
from tests.helpers.random_features import C, D, F, N, Q, with_holes

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("holes", [False, True])
def test_a_prior_on_the_noise_is_one_site_outside_the_rows(Y, holes):
    Y = with_holes(Y) if holes else Y
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F)
    model.likelihood.variance = PyroSample(dist.LogNormal(0.0, 1.0))
    nodes = poutine.trace(model).get_trace(Y).nodes
    assert [name for name in nodes if "variance" in name and nodes[name]["type"] == "sample"] == ["likelihood.variance"]
    assert nodes["likelihood.variance"]["fn"].batch_shape == ()
    rows = nodes["y"]["fn"]
    slow = dist.Normal(rows.rows.base_dist.base_dist.f_mean, nodes["likelihood.variance"]["value"].sqrt())
    expected = torch.where(torch.isnan(Y), 0.0, slow.log_prob(torch.nan_to_num(Y))).sum(-1)
    torch.testing.assert_close(rows.log_prob(nodes["y"]["value"]), expected)


class TestPriorsOfTheModel:
    @staticmethod
    def _with_prior(Y, name, prior):
        model = RandomFeatureLVM(N, D, Q, num_frequencies=F, num_components=C)
        setattr(model, name, PyroSample(prior))
        return model.initialize(10.0 * Y), MeanFieldGuide(model, init_scale=0.3)

    def test_survive_initialisation_whose_value_guides_start_at(self, Y):
        _, guide = self._with_prior(Y, "kernel_variance", dist.LogNormal(0.0, 1.0))
        guide(10.0 * Y)
        expected = (10.0 * (Y - Y.mean(0))).square().mean()
        torch.testing.assert_close(guide.median()["kernel_variance"], expected)

    def test_kernel_has_the_mean_of_its_variance_under_the_guide(self, Y):
        model, guide = self._with_prior(Y, "kernel_variance", dist.LogNormal(0.0, 1.0))
        guide(10.0 * Y)
        state, x = torch.get_rng_state(), torch.zeros(1, Q)
        variance = model.kernel(guide, x).item()
        assert torch.equal(state, torch.get_rng_state())
        assert model.kernel(guide, x) == variance
        # A log-normal of σ = 0.3, of which 100 draws have a mean within 0.031 of theirs.
        expected = guide.median()["kernel_variance"].item() * math.exp(0.5 * 0.3**2)
        assert abs(variance / expected - 1.0) < 4 * 0.031

    @pytest.mark.parametrize("name", ["component_locs", "component_scales"])
    def test_of_components_are_drawn_for_each_particle(self, Y, name):
        base = dist.Normal(0.0, 1.0) if name == "component_locs" else dist.LogNormal(0.0, 1.0)
        model, guide = self._with_prior(Y, name, base.expand([C, Q]).to_event(2))
        guide(Y)
        assert_particles_are_those_one_by_one(model, guide, Y)


def test_what_is_held_stays_where_it_is(Y):
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F)
    model.kernel_variance_unconstrained.requires_grad_(False)
    assert model.initialize(10.0 * Y).kernel_variance == 1.0


@pytest.mark.usefixtures("unchecked")
def test_concentration_may_be_whole_numbers(Y):
    model = RandomFeatureLVM(N, D, Q, num_frequencies=F, concentration=(2, 1))
    assert model.concentration.dtype == Y.dtype
    assert model().shape == (N, D)
