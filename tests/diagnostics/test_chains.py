"""Fits as chains of a tree."""

import arviz_stats
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.diagnostics import chains_to_arviz, to_arviz

Y = torch.tensor([[1.0, 2.0], [torch.nan, 0.5], [0.0, 1.0]])


def model(y):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        fn = dist.Normal(loc, 1.0).mask(~y.isnan()).to_event(1)
        pyro.sample("y", fn, obs=y.nan_to_num())


def guide_at(place, scale=0.1, size=2):
    def guide(y):
        pyro.sample("loc", dist.Normal(torch.full((size,), place), scale).to_event(1))

    return guide


def test_each_fit_is_the_tree_of_its_own_draws():
    fits = [(model, guide_at(place)) for place in (-1.0, 0.0, 2.0)]
    options = {"num_samples": 40, "dims": {"loc": ["column"]}}
    tree = chains_to_arviz(fits, Y, seed=3, **options)
    for chain, (_, guide) in enumerate(fits):
        alone = to_arviz(model, guide, Y, seed=3 + chain, **options)
        assert tree.children.keys() == alone.children.keys()
        for name in ("posterior", "posterior_predictive", "log_likelihood", "sample_stats"):
            for variable in alone[name].data_vars:
                np.testing.assert_array_equal(tree[name][variable].sel(chain=chain), alone[name][variable].sel(chain=0))
        np.testing.assert_array_equal(tree.observed_data["y"], alone.observed_data["y"])
        assert set(tree.log_likelihood.coords) == set(alone.log_likelihood.coords)
    assert tree.posterior["loc"].dims == ("chain", "draw", "column")
    assert tree.attrs["inference_library"] == "pyro"


def test_r_hat_is_one_for_equal_fits_and_large_for_different_optima():
    same = chains_to_arviz([(model, guide_at(0.0))] * 4, Y, num_samples=500, seed=0)
    other = chains_to_arviz([(model, guide_at(place)) for place in (0.0, 0.0, 0.0, 0.5)], Y, num_samples=500, seed=0)
    assert (arviz_stats.rhat(same)["loc"] < 1.02).all()
    assert (arviz_stats.rhat(other)["loc"] > 1.5).all()
    draws = same.posterior["loc"]
    assert not np.array_equal(draws.sel(chain=0), draws.sel(chain=1))


def test_fits_of_other_shapes_and_none_are_refused():
    with pytest.raises(ValueError, match="a pair of model and guide or more, got none"):
        chains_to_arviz([], Y)

    def other(y):
        pyro.sample("scale", dist.Gamma(1.0, 1.0))
        model(y)

    with pytest.raises(ValueError, match="the same sites of the same shapes in group 'posterior'"):
        chains_to_arviz([(model, guide_at(0.0)), (other, guide_at(0.0))], Y, num_samples=5)
