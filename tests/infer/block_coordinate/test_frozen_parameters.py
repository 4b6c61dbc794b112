"""Frozen parameters."""

import pyro
import pytest
import torch
from torch import nn

from pyro_lvgp.infer import Block, BlockCoordinateVI
from tests.infer.block_coordinate._regression import Guide, Model, Q, adam, data, exact_loss, parts, precision_update, run_on

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("plain", [False, True], ids=["PyroParam", "nn.Parameter"])
def test_frozen_parameters_stay_and_need_no_block(plain):
    m, g = Model(), Guide()
    if plain:
        m.noise = nn.Parameter(torch.tensor(0.5))
    frozen = m.noise if plain else m.noise_unconstrained
    frozen.requires_grad_(False)
    vi = BlockCoordinateVI(m, g, [Block("w", params=["guide.*"], optimizer=adam())])
    run_on(vi, *data(), steps=3)
    assert not frozen.requires_grad
    assert m.noise == 0.5
    before = g.precision.clone()
    g.precision_unconstrained.requires_grad_(False)  # now as well as at the start
    vi.step(*data())
    assert torch.equal(g.precision, before)


def test_what_is_frozen_later_is_not_updated():
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    blocks = [Block("mean", sites=["w"], optimizer=adam()), Block("precision", params=["guide.p*"], update=precision_update)]
    vi = BlockCoordinateVI(m, g, blocks)
    args = data()
    vi.step(*args)
    updated = g.precision.clone()
    g.precision_unconstrained.requires_grad_(False)
    vi.step(args[0][:3], args[1][:3])
    assert torch.equal(g.precision, updated)


@pytest.mark.usefixtures("_local")
def test_what_is_frozen_before_the_first_step_may_be_in_a_block():
    """By gradient and in closed form, of its own or beside others, whether the closed form has its value or not."""
    args = data()
    for with_frozen in (True, False):
        pyro.clear_param_store()
        m, g = Model(), Guide()
        m.noise_unconstrained.requires_grad_(False)
        g.precision_unconstrained.requires_grad_(False)

        def update(X, y, with_frozen=with_frozen):
            frozen = {"guide.precision": torch.full((Q,), 7.0)} if with_frozen else {}
            return {"guide.w.mean": torch.ones(Q)} | frozen

        def nothing(X, y):
            raise AssertionError("there is nothing to move")

        blocks = [
            Block("noise", params=["model.noise"], optimizer=adam()),
            Block("w", params=["guide.w.*", "guide.precision"], update=update),
            Block("precision", params=["guide.precision"], update=nothing),
        ]
        vi = BlockCoordinateVI(m, g, blocks, loss=exact_loss)
        before = exact_loss(m, g, *args).item()
        assert vi.step(*args) == pytest.approx(before)
        assert m.noise == 0.5
        assert torch.equal(g.precision, torch.ones(Q))
        torch.testing.assert_close(g.w.mean.detach(), torch.ones(Q))
        assert vi.state_dict()["optimizers"]["noise"]["state"] == {}


@pytest.mark.parametrize("only", [False, True], ids=["beside others", "alone in its block"])
def test_a_parameter_that_is_freed_later_moves_from_then_on(only):
    (X, y), (model, guide) = data(), parts("modules")
    model.noise_unconstrained.requires_grad_(False)
    blocks = [Block("noise", params=["model.*"], optimizer=adam()), Block("rest", params=["guide.*"], optimizer=adam())]
    vi = BlockCoordinateVI(model, guide, blocks if only else [Block("all", params=["*"], optimizer=adam())])
    for _ in range(3):
        vi.step(X, y)
    assert model.noise == 0.5
    model.noise_unconstrained.requires_grad_(True)
    for _ in range(3):
        vi.step(X, y)
    assert abs(model.noise - 0.5) > 0.01


def test_a_parameter_without_a_block_cannot_be_freed():
    (X, y), (model, guide) = data(), parts("modules")
    model.noise_unconstrained.requires_grad_(False)
    vi = BlockCoordinateVI(model, guide, [Block("guide", params=["guide.*"], optimizer=adam())])
    vi.step(X, y)
    model.noise_unconstrained.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"model.noise.*to stay frozen"):
        vi.step(X, y)
