"""Sites without an encoder in mini-batches."""

import pytest
import torch

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet
from tests.helpers.structured import D, N, Q, make_data, make_model

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("site", ["f", "w"])
def test_free_sites_belong_to_points_and_want_all_of_them(site):
    model = make_model(num_data=N, independent_dim=1)
    x, y = make_data()
    idx = torch.tensor([3, 0])

    def make_guide():
        return StructuredGPGuide(model, encoders={"f": FactorNet(D, Q, [2]), "w": FactorNet(D, 1, [2])} | {site: None})

    with pytest.raises(ValueError, match=f"expected an encoder for site '{site}', or all points at every step"):
        make_guide()(x[idx], y[idx], idx)
    guide = make_guide()
    guide(x, y)
    with pytest.raises(ValueError, match=r"all points that the free sites of 'f' belong to|invalid shape of .*locs.w"):
        guide(x[idx], y[idx], idx)


def test_free_sites_of_series_in_another_order_are_refused():
    x, y = torch.linspace(0.0, 1.0, 5)[:, None].expand(3, 5, 1), torch.randn(3, 5, 2)
    model = GPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2, 2, (4,)), num_data=3)
    guide = StructuredGPGuide(model)
    guide(x, y, torch.arange(3))
    with pytest.raises(ValueError, match="expected fewer rows than the 3 of plate 'series', or all of them in order"):
        guide(x, y, torch.tensor([0, 2, 1]))
