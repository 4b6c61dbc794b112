"""Quantiles and medians."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.networks import FactorNet
from tests.helpers.structured import B, D, Q, make_data, make_model, posterior_of

pytestmark = pytest.mark.usefixtures("float64")


def test_quantiles_of_f_are_those_of_its_marginals_at_the_medians_of_the_others():
    model = make_model()
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q, 1), 1.0).to_event(2))
    guide, (x, y) = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q)}), make_data(B)
    guide(x, y)
    guide.mean_field.locs.kernel.lengthscale = torch.tensor([[-1.0], [0.5]])
    median, quantiles = guide.median(x, y), guide.quantiles([0.1, 0.5], x, y)
    torch.testing.assert_close(median["kernel.lengthscale"], torch.tensor([[-1.0], [0.5]]).exp())
    q = posterior_of(poutine.condition(guide, {"kernel.lengthscale": median["kernel.lengthscale"]}), x, y)
    torch.testing.assert_close(median["f"], q.mean)
    torch.testing.assert_close(quantiles["f"][0], q.mean - 1.2815515655446004 * q.variance.sqrt())
    torch.testing.assert_close(quantiles["f"][1], median["f"])


def test_quantiles_before_the_first_call():
    with pytest.raises(ValueError, match=r"no parameters before its first call"):
        StructuredGPGuide(make_model(), encoders={"f": FactorNet(D, Q)}).median(*make_data())
