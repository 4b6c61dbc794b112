"""Missing entries of the data."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.infer.sampling import sample_traces


def test_missing_entries(incomplete):
    y, tree = incomplete
    seen = ~torch.isnan(y).numpy()
    np.testing.assert_array_equal(tree["observed_data"]["y"], y)
    assert tree["observed_data"]["y"].dims == ("data", "output")
    assert tree["posterior_predictive"]["y"].shape == (1, 300, 6, 3)
    assert np.isfinite(tree["posterior_predictive"]["y"]).all()
    likelihood = tree["log_likelihood"]["y_observed"]
    assert list(tree["log_likelihood"].data_vars) == ["y_observed"]
    weight = torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, 1.0]])
    by_hand = dist.Normal(torch.tensor(tree["posterior"]["z"].values) @ weight, 0.5).log_prob(y.nan_to_num())
    np.testing.assert_allclose(likelihood, by_hand.numpy()[:, :, seen], rtol=1e-4, atol=1e-4)
    where = likelihood.coords["y_data"].values, likelihood.coords["y_output"].values
    np.testing.assert_array_equal(tree["observed_data"]["y_observed"], y.numpy()[where])
    np.testing.assert_array_equal(
        tree["posterior_predictive"]["y_observed"], tree["posterior_predictive"]["y"].values[:, :, *where]
    )


def test_counts_and_booleans_with_missing_entries_become_floats():
    counts, coins = torch.tensor([3, 0, 5]), torch.tensor([True, False, True])

    def model():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("count", dist.Poisson(rate).mask(torch.tensor([True, False, True])), obs=counts)
            pyro.sample("coin", dist.Bernoulli(0.5), obs=coins.float())

    tree = to_arviz(model, AutoNormal(model), num_samples=4)
    np.testing.assert_array_equal(tree["observed_data"]["count"], [3, np.nan, 5])
    np.testing.assert_array_equal(tree["observed_data"]["coin"], coins)
    assert set(tree["log_likelihood"].data_vars) == {"count_observed", "coin"}


@pytest.mark.parametrize("mask", [True, False])
def test_a_delta_likelihood_is_observed(mask):
    """Data that a Delta meets are data, masked or not."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Delta(torch.ones(2), 0.0 * mu, event_dim=1).mask(mask), obs=y)

    site = sample_traces(model, AutoNormal(model), torch.ones(2), num_samples=3).sites["y"]
    assert site.kind == "observed"
    assert site.is_observed == mask


class GappyNormal(dist.Normal):
    """A distribution that takes NaN for missing by itself, without a mask."""

    def log_prob(self, value):
        return torch.where(torch.isnan(value), 0.0, super().log_prob(torch.nan_to_num(value)))


def test_nan_without_a_mask_is_missing():
    y = torch.tensor([0.5, torch.nan, 2.0])

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", GappyNormal(mu, torch.ones(3), validate_args=False), obs=y)

    tree = to_arviz(model, AutoNormal(model), y, num_samples=4)
    np.testing.assert_array_equal(tree["observed_data"]["y_observed"], [0.5, 2.0])
    np.testing.assert_array_equal(tree["log_likelihood"]["y_data"], [0, 2])
