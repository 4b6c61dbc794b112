"""Ranks of truths among draws of posteriors that are exact, too narrow, too wide or biased."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam
from scipy.stats import kstest

from pyro_lvgp.diagnostics import simulation_based_calibration
from pyro_lvgp.diagnostics.simulation_based_calibration import _ranks, _test
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import fit

NUM_DATA = 3


def model(y):
    """Of a location with posterior N(Σy / 4, ¼)."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("data", NUM_DATA):
        return pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def conjugate(factor=1.0, shift=0.0):
    def make_guide(model, y):
        def guide(y):
            pyro.sample("loc", dist.Normal(y.sum() / 4.0 + shift, factor * 0.5))

        return guide

    return make_guide


def calibrate(make_guide, num_simulations=200, **options):
    return simulation_based_calibration(model, make_guide, num_simulations, progress=False, **options)


def test_ranks_of_an_exact_posterior_are_uniform():
    state = torch.get_rng_state()
    result = calibrate(conjugate())
    assert torch.equal(state, torch.get_rng_state())
    assert result.p_values["loc"] > 1e-3
    ranks = result["loc"].ranks
    assert ranks.shape == (200,)
    assert 0 <= ranks.min() < 5
    assert 95 <= ranks.max() <= 99
    assert kstest((ranks + 0.5) / 100.0, "uniform").pvalue > 1e-3  # another test of the same ranks


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"factor": 0.5}, "posterior too narrow"),
        ({"factor": 2.0}, "posterior too wide"),
        ({"shift": 0.3}, "posterior too high"),
        ({"shift": -0.3}, "posterior too low"),
    ],
)
def test_other_posteriors_are_rejected(options, shape):
    result = calibrate(conjugate(**options))
    assert result.p_values["loc"] < 1e-3
    assert f"loc: p = {result.p_values['loc']:.2g}, {shape}" in str(result)


def test_p_values_of_exact_posteriors_are_uniform_though_entries_are_dependent():
    """Of a site with five entries that are nearly the same number."""
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(60):
        values = rng.standard_normal((40, 20, 1)) + 0.1 * rng.standard_normal((40, 20, 5))
        ranks = np.stack([_ranks(each, "x", rng) for each in values])
        p_values.append(_test(ranks, ("x_dim_0",), rng).p_value)
    assert kstest(p_values, "uniform").pvalue > 1e-3
    pooled = np.mean(np.array(p_values) < 0.05)
    assert pooled < 0.05 + 3.0 * math.sqrt(0.05 * 0.95 / 60)


def test_ties_are_broken_at_random():
    rng = np.random.default_rng(0)
    ranks = np.stack([_ranks(np.zeros((10, 1)), "x", rng)[0, 0] for _ in range(2000)])
    counts = np.bincount(ranks, minlength=10)
    assert (np.abs(counts - 200) < 4.5 * math.sqrt(2000 * 0.1 * 0.9)).all()


def correlated(y):
    """Two effects of which only the sum is well known: posterior correlation −0.98."""
    effects = pyro.sample("effects", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", 4):
        return pyro.sample("y", dist.Normal(effects.sum(-1), 0.3), obs=y)


def test_mean_field_is_too_narrow_for_correlated_effects_and_chains_are_less_so():
    def mean_field(model, y):
        """The best mean-field guide, with the mean of the posterior and the diagonal of its precision 1 1ᵀ 4 / 0.3² + I."""
        guide = MeanFieldGuide(model)
        guide(y)
        weight = 4.0 / 0.3**2
        guide.locs.effects = torch.full((2,), weight * y.mean().item() / (1.0 + 2.0 * weight))
        guide.scales.effects = torch.full((2,), (1.0 + weight) ** -0.5)
        return guide

    narrow = simulation_based_calibration(correlated, mean_field, 30, progress=False, num_draws=19)
    assert narrow.p_values["effects"] < 1e-3
    assert "posterior too narrow" in str(narrow)

    def annealed(model, y):
        guide = AutoAnnealedLangevin(model, num_steps=4)
        guide(y)
        return guide

    exact = simulation_based_calibration(correlated, annealed, 30, progress=False, num_draws=19)
    assert exact.p_values["effects"] > 1e-3


class WithParameter(PyroModule):
    """Rows with latents, and a noise without a prior."""

    def __init__(self):
        super().__init__()
        self.noise = PyroParam(torch.tensor(0.5), dist.constraints.positive)

    def forward(self, x, y=None):
        with pyro.plate("rows", 4):
            z = pyro.sample("z", dist.Normal(0.0, torch.ones(2)).to_event(1))
            return pyro.sample("y", dist.Normal(z * x, self.noise).to_event(1), obs=y)


def test_parameters_stay_and_inputs_and_plates_are_known():
    module = WithParameter()
    x, variance = torch.tensor([1.0, 2.0]), 0.25

    def make_guide(model, x, y):
        def guide(x, y):
            with pyro.plate("rows", 4):
                posterior = 1.0 / (1.0 + x.square() / variance)
                pyro.sample("z", dist.Normal(posterior * x * y / variance, posterior.sqrt().expand(4, 2)).to_event(1))

        fit(model, guide, x, y, num_steps=3, progress=False)
        return guide

    def changing(model, x, y):
        model.noise = torch.tensor(2.0)
        return make_guide(model, x, y)

    result = simulation_based_calibration(module, make_guide, 50, x, num_draws=19, progress=False)
    assert module.noise.item() == 0.5
    assert result.p_values["z"] > 1e-3
    ranks = result.to_xarray()
    assert ranks["z"].dims == ("simulation", "rows", "z_dim_0")
    assert ranks["z"].attrs["p_value"] == result.p_values["z"]
    assert ranks.attrs["num_draws"] == 19
    with pytest.raises(ValueError, match=r"leave the parameters .* got changes of \['noise_unconstrained"):
        simulation_based_calibration(module, changing, 2, x, progress=False)


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="expected a data_site and latent sites of the model, got"):
        calibrate(conjugate(), data_site="data")
    with pytest.raises(ValueError, match="expected a data_site and latent sites of the model, got"):
        calibrate(conjugate(), sites=["mu"])
    with pytest.raises(ValueError, match="num_simulations of 2 or more, got 1"):
        calibrate(conjugate(), num_simulations=1)
    with pytest.raises(ValueError, match="draws of site 'loc' that are numbers, got NaN"), pyro.validation_enabled(False):
        calibrate(conjugate(shift=math.nan), num_simulations=2)

    def learning(y):
        noise = pyro.param("noise", torch.ones(()))
        return pyro.sample("y", dist.Normal(0.0, noise), obs=y)

    with pytest.raises(ValueError, match=r"without pyro.param, .* got parameters \['noise'\]"):
        simulation_based_calibration(learning, conjugate(), 2, progress=False)
