"""Checks of updates against the bound."""

import pyro
import pytest
from pyro.infer import Trace_ELBO

from pyro_lvgp.infer import Block, BlockCoordinateVI
from tests.infer.block_coordinate._regression import Guide, Model, adam, data, exact_loss, run_on

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("factor", [0.5, 1.0, 10.0])
def test_a_wrong_closed_form_is_found_out(factor):
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)

    def update(X, y):
        return {"guide.precision": factor * (1.0 + X.square().sum(0) / 0.25)}

    args, blocks = (
        data(),
        [Block("precision", params=["guide.precision"], update=update), Block("w", sites=["w"], optimizer=adam())],
    )
    vi = BlockCoordinateVI(m, g, blocks, loss=exact_loss, check_updates=True)
    g.precision = 1.0 + args[0].square().sum(0) / 0.25
    if factor == 1.0:
        for _ in range(5):
            vi.step(*args)
    else:
        with pytest.raises(RuntimeError, match="the update of block 'precision' raised the loss from"):
            vi.step(*args)


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_wrong_closed_form_is_found_out_by_many_estimates(factor):
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    args = data()
    best = 1.0 + args[0].square().sum(0) / 0.25
    blocks = [
        Block("precision", params=["guide.precision"], update=lambda X, y: {"guide.precision": factor * best}),
        Block("w", sites=["w"], optimizer=adam()),
    ]
    vi = BlockCoordinateVI(m, g, blocks, loss=Trace_ELBO(), check_updates=200)
    g.precision = 1.5 * best
    if factor == 1.0:
        vi.step(*args)
    else:
        with pytest.raises(RuntimeError, match="the update of block 'precision' raised the loss from"):
            vi.step(*args)


def test_checks_leave_the_random_state_alone():
    losses = []
    for check in (False, True):
        pyro.clear_param_store()
        m, g = Model(), Guide()
        blocks = [Block("rest", params=["model.*", "guide.w.*"], optimizer=adam())]
        blocks.append(
            Block("precision", params=["guide.precision"], update=lambda X, y, g=g: {"guide.precision": g.precision})
        )
        losses.append(run_on(BlockCoordinateVI(m, g, blocks, check_updates=check), *data_of_seed()))
    assert losses[0] == losses[1]


def data_of_seed():
    pyro.set_rng_seed(5)
    return data()
