"""Encoders of users that derive from the base class."""

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import Encoder, loc_and_scale
from tests.helpers.abstract import missing_methods


class LinearEncoder(Encoder):
    def __init__(self, data_dim, latent_dim):
        super().__init__(data_dim, latent_dim, init_scale=0.3)
        self.net = nn.Linear(data_dim, 2 * latent_dim)

    def forward(self, y):
        y, observed = self.split_missing(y)
        return loc_and_scale(self.net(y) * observed.any(-1, keepdim=True), self.init_scale)


def test_an_encoder_of_a_user_in_a_guide():
    Y = torch.randn(10, 3)
    Y[0] = Y[1, 1] = torch.nan
    encoder = LinearEncoder(3, 2)
    torch.testing.assert_close(encoder(Y)[1][0], torch.full((2,), 0.3))
    model = BayesianGPLVM(10, 3, latent_dim=2, num_inducing=4)
    guide = MeanFieldGuide(model, encoders={"X": encoder})
    before = encoder.net.bias.detach().clone()
    SVI(model, guide, Adam({"lr": 0.01}), MeanFieldELBO()).step(torch.randn(10, 3))
    assert (encoder.net.bias != before).all()


def test_an_encoder_must_implement_forward():
    with pytest.raises(TypeError, match="abstract class Encoder .*" + missing_methods("forward")):
        Encoder(3, 2, 0.5)
