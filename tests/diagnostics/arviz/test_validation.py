"""Errors of the conversion."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.diagnostics import to_arviz
from tests.diagnostics.arviz._models import local_and_global


def test_plates_named_as_arviz_names_draws_are_refused():
    def model(y):
        with pyro.plate("draw", 3):
            pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"other names than ArviZ's own \['draw'\]; rename the plate"):
        to_arviz(model, AutoNormal(model), torch.zeros(3), num_samples=2)


def test_errors_say_what_to_mend():
    y = torch.zeros(5, 3)
    model = local_and_global
    with pytest.raises(ValueError, match=r"among .*got \['nope'\]"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, dims={"nope": ["a"]})
    with pytest.raises(ValueError, match="site 'z': expected a name for each of 1 event"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, dims={"z": ["data", "latent"]})
    with pytest.raises(ValueError, match="different names"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, dims={"z": ["data"]})
    with pytest.raises(ValueError, match="dimension 'k': expected one size"):
        to_arviz(conjugate_vector, AutoNormal(conjugate_vector), num_samples=2, dims={"a": ["k"], "b": ["k"]})
    with pytest.raises(ValueError, match=r"coords: expected dimensions among .*'data'.*, got \['rows'\]"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, coords={"rows": range(5)})
    with pytest.raises(ValueError, match="coords of 'data': expected 5 values, got 2"):
        to_arviz(model, AutoNormal(model), y, num_samples=2, coords={"data": [0, 1]})
    with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
        to_arviz(model, AutoNormal(model), y, num_samples=0)
    with pytest.raises(ValueError, match="sample sites, got none"):
        to_arviz(lambda: None, lambda: None)


def conjugate_vector():
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def test_observing_a_latent_is_refused():
    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=1.0 - mu)

    for vectorize in (True, False):
        with pytest.raises((ValueError, RuntimeError), match="depends on the latent sites"):
            to_arviz(model, AutoNormal(model), num_samples=3, vectorize=vectorize)
