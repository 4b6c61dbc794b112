"""Optimisers, schedules and blocks of a fit."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD, Adam

from pyro_lvgp.infer import Block, BlockCoordinateVI, fit
from tests.helpers.fits import Climb, no_guide


def test_schedules():
    def factors(schedule):
        pyro.clear_param_store()
        path = [0.0]
        # With a constant gradient every step of Adam is as long as its learning rate.
        Climb().fit(
            num_steps=8,
            learning_rate=0.1,
            schedule=schedule,
            callback=lambda *_: path.append(pyro.param("p").item()),
        )
        return -np.diff(path) / 0.1

    np.testing.assert_allclose(factors("constant"), np.ones(8), rtol=1e-4)
    np.testing.assert_allclose(factors("cosine"), 0.5 * (1 + np.cos(np.pi * np.arange(8) / 8)), rtol=1e-3)
    np.testing.assert_allclose(factors(lambda step: 1 / (1 + step)), 1 / np.arange(1.0, 9), rtol=1e-3)


def test_an_optimiser_of_your_own():
    Climb().fit(optim=SGD({"lr": 0.5}), learning_rate=100.0)
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
        Block("mean", params=["mean"], optim=lambda tensors: torch.optim.SGD(tensors, lr=0.1)),
        Block("precision", params=["precision"], update=lambda y: {"precision": torch.tensor(1.0 + len(y))}),
    ]
    found = []
    for loop in (
        lambda: fit(model, guide, y, blocks=blocks, num_steps=4, progress=False).losses,
        lambda: [vi.step(y) for vi in [BlockCoordinateVI(model, guide, blocks)] for _ in range(4)],
    ):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        found.append((loop(), pyro.param("mean").item(), pyro.param("precision").item()))
    assert found[0] == found[1]
    assert found[0][2] == 4.0
    with pytest.raises(ValueError, match="expected an optimiser or blocks, got both"):
        fit(model, guide, y, blocks=blocks, optim=Adam({"lr": 0.1}), progress=False)
    with pytest.raises(ValueError, match=r"expected blocks alone, .* got learning_rate too; .* guide.blocks\(learning_rate="):
        fit(model, guide, y, blocks=blocks, learning_rate=0.1, progress=False)


def test_a_schedule_of_the_fit_is_that_of_blocks_that_move_by_gradient():
    def model(y):
        mean = pyro.param("a", torch.tensor(0.0)) + pyro.param("b", torch.tensor(0.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([1]).to_event(1), obs=y)

    def blocks(schedule=None):
        descent = lambda tensors: torch.optim.SGD(tensors, lr=0.5)  # noqa: E731
        closed = {"update": lambda y: {"b": y[0] - pyro.param("a") + 1.0}, "damping": 0.5}
        return [Block("a", params=["a"], optim=descent, schedule=schedule), Block("b", params=["b"], **closed)]

    def ends(blocks, **settings):
        pyro.clear_param_store()
        losses = fit(model, no_guide, torch.tensor([3.0]), blocks=blocks, num_steps=4, progress=False, **settings).losses
        return [*losses, pyro.param("a").item()]

    constant, cosine = ends(blocks()), ends(blocks(), schedule="cosine")
    assert ends(blocks(), schedule="constant") == constant != cosine
    assert cosine == pytest.approx(ends(blocks(lambda sweep: 0.5 * (1.0 + math.cos(math.pi * sweep / 4.0)))))
    with pytest.raises(ValueError, match="expected one schedule, got one of the fit and one of block 'a'"):
        ends(blocks(float), schedule="cosine")
