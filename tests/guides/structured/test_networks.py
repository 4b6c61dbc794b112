"""Parameters of the encoders."""

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import IndexNet
from tests.helpers.structured import D, Q, make_data

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("local", [False, True])
def test_frozen_parameters_of_networks_stay_frozen(local):
    with pyro.settings.context(module_local_params=local):
        decoder = nn.Linear(Q, D)
        decoder.weight.requires_grad_(False)
        before = decoder.weight.clone(), decoder.bias.clone()
        model = GPVAE(Matern(1, 1.5, batch_shape=(Q,)), decoder)
        svi = SVI(model, StructuredGPGuide(model, encoders={"f": IndexNet(D, Q)}), Adam({"lr": 0.1}), StructuredELBO())
        svi.step(*make_data())
        assert torch.equal(model.decoder.weight, before[0])
        assert not torch.equal(model.decoder.bias, before[1])


def test_networks_that_share_a_parameter_are_refused():
    first, second = nn.Linear(Q, Q), nn.Linear(Q, Q)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"one shared by '0\.weight' and '2\.weight'"):
        GPVAE(RBF(1, batch_shape=(Q,)), nn.Sequential(first, nn.Tanh(), second))
    twice = nn.Linear(Q, Q)
    GPVAE(RBF(1, batch_shape=(Q,)), nn.Sequential(twice, nn.Tanh(), twice))
