"""Global guides of a user's own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.inspect import get_model_relations

from pyro_lvgp.guides import AutoAnnealedLangevin
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("returned", [lambda scale: None, lambda scale: scale, lambda scale: {"scale": scale}])
def test_a_global_guide_may_be_a_function_that_returns_anything(returned):
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    def global_guide(y):
        return returned(pyro.sample("scale", dist.LogNormal(pyro.param("loc", torch.tensor(0.3)), 0.1)))

    y = torch.randn(3)
    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2, global_guide=global_guide)
    assert guide(y).keys() == {"scale", "x"}
    draws = guide.sample_posterior(200, y)
    assert draws["scale"].shape == (200,)
    assert draws["x"].shape == (200, 3)
    assert abs(draws["scale"].log().mean() - 0.3) < 0.03


def test_a_global_guide_may_make_its_plates_itself():
    def model(y):
        with pyro.plate("groups", 2):
            pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6, subsample_size=3) as rows:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            x = pyro.sample("x", dist.Normal(z, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[rows])

    means = torch.arange(6.0)

    def global_guide(y):
        with pyro.plate("groups", 2):
            pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6, subsample_size=3) as rows:
            pyro.sample("z", dist.Normal(means[rows], 1e-6))

    guide = AutoAnnealedLangevin(model, local_plate="data", sites=["x"], num_steps=2, global_guide=global_guide)
    y = torch.randn(6)
    trace = poutine.trace(guide).get_trace(y)
    assert trace.nodes["level"]["value"].shape == (2,)
    torch.testing.assert_close(trace.nodes["z"]["value"], means[trace.nodes["data"]["value"]], atol=1e-4, rtol=0.0)
    assert guide.sample_posterior(5, y)["x"].shape == (5, 3)


def test_what_its_sites_depend_on_can_be_drawn():
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(y, scale))

    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    guide(torch.zeros(3))
    assert get_model_relations(guide, (torch.zeros(3),))["sample_sample"] == {"scale": [], "x": ["scale"]}


def test_globals_that_nobody_draws_are_refused():
    model, Y = small()
    with pytest.raises(ValueError, match=r"every latent site to be in the guide, got \['u'\], neither annealed nor drawn"):
        AutoAnnealedLangevin(model, global_guide=lambda y, idx=None: None)(Y)
