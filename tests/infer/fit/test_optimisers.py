"""Optimisers and blocks of a fit."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD

from pyro_lvgp.infer import Block, BlockCoordinateVI, fit
from tests.helpers.fits import Climb


def test_an_optimiser_of_your_own():
    Climb().fit(optim=SGD({"lr": 0.5}))
    assert pyro.param("p").item() == pytest.approx(-2.0)


def test_blocks_sweep_as_they_do_by_hand():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    def guide(y):
        mean, precision = pyro.param("mean", torch.tensor(0.0)), pyro.param("precision", torch.tensor(1.0))
        pyro.sample("loc", dist.Normal(mean, precision.rsqrt()))

    y = torch.tensor([1.0, 2.0, 4.0])
    blocks = [
        Block("mean", params=["mean"], optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.1)),
        Block("precision", params=["precision"], update=lambda y: {"precision": torch.tensor(1.0 + len(y))}),
    ]
    found = []
    for loop in (
        lambda: fit(model, guide, y, optim=blocks, num_steps=4, progress=False).losses,
        lambda: [vi.step(y) for vi in [BlockCoordinateVI(model, guide, blocks)] for _ in range(4)],
    ):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        found.append((loop(), pyro.param("mean").item(), pyro.param("precision").item()))
    assert found[0] == found[1]
    assert found[0][2] == 4.0
