"""State of the blocks."""

import copy

import pyro
import pytest
import torch

from pyro_lvgp.infer import Block, BlockCoordinateVI
from tests.infer.block_coordinate._regression import Guide, Model, adam, data, exact_loss, precision_update, run_on

pytestmark = pytest.mark.usefixtures("float64")


def test_a_first_step_that_fails_is_made_again():
    """With no block left out."""
    args, fails = data(), iter([True, True, False])

    def optim(tensors):
        return None if next(fails) else torch.optim.Adam(tensors, lr=0.1)

    m, g = Model(), Guide()
    blocks = [Block("model", params=["model.*"], optimizer=adam()), Block("guide", params=["guide.*"], optimizer=optim)]
    vi = BlockCoordinateVI(m, g, blocks)
    for _ in range(2):
        with pytest.raises(TypeError, match="block 'guide': expected optimizer to make a torch optimiser"):
            vi.step(*args)
    vi.step(*args)
    assert m.noise != 0.5
    assert (g.w.mean != 0.0).all()


def test_states_of_other_blocks_are_refused():
    vi = BlockCoordinateVI(Model(), Guide(), [Block("all", params=["*"], optimizer=adam())])
    vi.step(*data())
    other = BlockCoordinateVI(Model(), Guide(), [Block("everything", params=["*"], optimizer=adam())])
    with pytest.raises(ValueError, match=r"expected states of the blocks \['everything'\], got those of \['all'\]"):
        other.load_state_dict(vi.state_dict())


def test_states_resume():
    args = data()

    def make():
        pyro.clear_param_store()
        m, g = Model(), Guide()
        blocks = [
            Block("noise", params=["model.*"], optimizer=adam(0.2)),
            Block("mean", sites=["w"], optimizer=adam()),
            Block("precision", params=["guide.p*"], update=precision_update, damping=lambda sweep: 1.0 / (1.0 + sweep)),
        ]
        return m, g, BlockCoordinateVI(m, g, blocks, loss=exact_loss)

    m, g, vi = make()
    run_on(vi, *args, steps=5)
    saved = vi.state_dict(), copy.deepcopy(m.state_dict()), copy.deepcopy(g.state_dict())
    straight = run_on(vi, *args, steps=5)
    for warm in (False, True):
        m, g, vi = make()
        if warm:
            vi.step(*args)
        m.load_state_dict(saved[1])
        g.load_state_dict(saved[2])
        vi.load_state_dict(saved[0])
        assert vi.state_dict()["num_sweeps"] == 5
        assert run_on(vi, *args, steps=5) == straight
