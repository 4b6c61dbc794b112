"""Errors of annealed guides."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from tests.guides.annealed.guide._models import regression
from tests.helpers.annealed import small

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps of 1 or more, got 0"),
        ({"dynamics": "brownian"}, "dynamics in .*, got 'brownian'"),
        ({"step_size": 2.0}, "0 < step_size < max_step_size, got 2.0 and 1.0"),
        ({"momentum_persistence": 1.0}, "momentum_persistence between 0 and 1, got 1.0"),
        ({"annealing_schedule": "cubic"}, "schedule .*, got 'cubic'"),
        ({"annealing_schedule": -1.0}, "positive power, got -1.0"),
        ({"annealing_schedule": math.inf}, "positive power, got inf"),
        ({"annealing_schedule": True}, "positive power, got True"),
    ],
)
def test_bad_arguments_are_refused(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        AutoAnnealedLangevin(regression, **arguments)


def test_bad_sites_are_refused():
    y = torch.randn(10)
    with pytest.raises(ValueError, match=r"among \['slope'\], got \['slop'\]"):
        AutoAnnealedLangevin(regression, sites=["slop"])(y)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"expected sites in plate 'data', got \['slope'\]"):
        AutoAnnealedLangevin(regression, local_plate="data", sites=["slope"])(y)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"expected a list of sites, got 'slope'; write \['slope'\]"):
        AutoAnnealedLangevin(regression, sites="slope")
    with pytest.raises(ValueError, match=r"compile=True needs a model with log_joint, got function"):
        AutoAnnealedLangevin(regression, compile=True)
    model, Y = small()
    with pytest.raises(ValueError, match=r"compile=True anneals the sites of the model's log_joint, got \['X', 'u'\]"):
        AutoAnnealedLangevin(model, sites=["X", "u"], compile=True)(Y)


def test_base_guides_that_have_run_are_refused():
    model, Y = small()
    base = MeanFieldGuide(model)
    base(Y)
    with pytest.raises(ValueError, match="expected a base guide that has not run"):
        AutoAnnealedLangevin(model, base_guide=base)


def test_base_guides_without_gaussians_are_refused(unchecked):
    with pytest.raises(TypeError, match=r"expected pyro_lvgp.guides.MeanFieldGuide\(model, ...\) as .*, got AutoNormal"):
        AutoAnnealedLangevin(regression, base_guide=AutoNormal(regression))
    with pytest.raises(TypeError, match=r"expected num_steps to be an integer, got 2\.5"):
        AutoAnnealedLangevin(regression, num_steps=2.5)


@pytest.mark.parametrize("observed", [True, False], ids=["data", "another latent"])
def test_what_depends_on_local_sites_outside_their_plate_is_refused(observed):
    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("z", dist.Normal(x, 1.0), obs=y)
        if observed:
            pyro.sample("total", dist.Normal(x.sum(-1), 1.0), obs=torch.tensor(1.0))
        else:
            pyro.sample("total", dist.Normal(x.sum(-1), 1.0))

    y = torch.randn(3)
    with pytest.raises(ValueError, match="in plate 'data', got site 'total' outside of it"):
        AutoAnnealedLangevin(model, local_plate="data", num_steps=2)(y)
    pyro.clear_param_store()
    AutoAnnealedLangevin(model, num_steps=2)(y)


def test_a_discrete_site_is_refused():
    def model():
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(z, 1.0))

    with pytest.raises(ValueError, match="got 'z', which is neither annealed nor drawn"):
        AutoAnnealedLangevin(model, sites=["x"], base_guide=MeanFieldGuide(poutine.block(model, hide=["z"])))()
