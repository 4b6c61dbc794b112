"""Blocks that move by gradient."""

import functools

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from pyro_lvgp.infer import Block, BlockCoordinateVI, LRSchedule, fit
from tests.helpers.fits import OnStep
from tests.infer.block_coordinate._regression import Guide, Model, Q, adam, data, exact_loss, parts, precision_update, run_on

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("kind", ["modules", "functions"])
def test_one_gradient_block_is_svi(kind, elbo):
    args, results = data(), []
    for make in (
        lambda m, g: SVI(m, g, pyro.optim.Adam({"lr": 0.1}), elbo()),
        lambda m, g: BlockCoordinateVI(m, g, [Block("all", params=["*"], optimizer=adam())], loss=elbo()),
    ):
        pyro.clear_param_store()
        m, g = parts(kind)
        g(*args)
        svi = make(m, g)
        losses = run_on(svi, *args)
        values = [x.detach() for part in (m, g) for x in part.parameters()] if kind == "modules" else []
        values += [x.detach() for _, x in sorted(pyro.get_param_store().items())]
        results.append((losses, values, svi.evaluate_loss(*args)))
    assert results[0][0] == results[1][0]
    assert len(results[0][1]) >= 3
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0.0, atol=0.0)
    assert results[0][2] == results[1][2]


class Spying(TraceMeanField_ELBO):
    """Notes which of some tensors require gradients, and may fail."""

    def __init__(self, tensors, fail=False):
        super().__init__()
        self.tensors, self.fail, self.seen = tensors, fail, []

    def loss_and_grads(self, *args, **kwargs):
        self.seen.append([tensor.requires_grad for tensor in self.tensors])
        value = super().loss_and_grads(*args, **kwargs)
        if self.fail:
            raise ArithmeticError("in the middle of a step")
        return value


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("fail", [False, True])
def test_only_the_block_that_moves_requires_gradients(fail):
    m, g = Model(), Guide()
    tensors = [m.noise_unconstrained, g.w.mean_unconstrained, g.precision_unconstrained]
    tensors[1].requires_grad_(False)
    first, second = Spying(tensors), Spying(tensors, fail)
    blocks = [
        Block("noise", params=["model.*"], optimizer=adam(), loss=first),
        Block("precision", params=["guide.precision"], optimizer=adam(), num_steps=2, loss=second),
    ]
    vi = BlockCoordinateVI(m, g, blocks)
    if fail:
        with pytest.raises(ArithmeticError):
            vi.step(*data())
    else:
        vi.step(*data())
    assert first.seen == [[True, False, False]]
    assert second.seen == [[False, False, True]] * (1 if fail else 2)
    assert [tensor.requires_grad for tensor in tensors] == [True, False, True]
    assert all(tensor.grad is None for tensor in tensors)


def test_gradients_left_by_others_do_not_count():
    results = []
    for stale in (False, True):
        pyro.clear_param_store()
        m, g = Model(), Guide()
        if stale:
            for parameter in (*m.parameters(), *g.parameters()):
                parameter.grad = torch.full_like(parameter, 100.0)
        vi = BlockCoordinateVI(m, g, [Block("all", params=["*"], optimizer=adam())], loss=exact_loss)
        torch.manual_seed(0)
        vi.step(*data())
        results.append([parameter.detach() for parameter in (*m.parameters(), *g.parameters())])
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)


def test_an_optimiser_with_line_search_solves_its_block():
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    lbfgs = functools.partial(torch.optim.LBFGS, max_iter=100, line_search_fn="strong_wolfe", tolerance_grad=1e-10)
    blocks = [Block("mean", sites=["w"], optimizer=lbfgs), Block("precision", params=["guide.p*"], update=precision_update)]
    (X, y), vi = data(), BlockCoordinateVI(m, g, blocks, loss=exact_loss)
    vi.step(X, y)
    expected = torch.linalg.solve(torch.eye(Q) + X.mT @ X / 0.25, X.mT @ y / 0.25)
    torch.testing.assert_close(g.w.mean.detach(), expected, rtol=1e-6, atol=1e-8)


def test_the_loss_of_a_step():
    m, g = Model(), Guide()
    m.noise_unconstrained.requires_grad_(False)
    args = data()
    precision = Block("precision", params=["guide.precision"], update=precision_update)
    mean = {"sites": ["w"], "optimizer": adam()}
    start = exact_loss(m, g, *args).item()
    # No gradient step on the bound: the loss before the sweep.
    assert BlockCoordinateVI(m, g, [precision, Block("mean", loss=Trace_ELBO(), **mean)], loss=exact_loss).step(*args) == start
    # Else that before the first gradient step on it.
    with torch.no_grad():
        g.precision = torch.ones(Q)
    before = [value.detach().clone() for value in g.parameters()]
    found = BlockCoordinateVI(m, g, [precision, Block("mean", num_steps=3, **mean)], loss=exact_loss).step(*args)
    updated = g.precision.detach().clone()
    for tensor, value in zip(g.parameters(), before, strict=True):
        tensor.data.copy_(value)
    g.precision = updated
    assert found == pytest.approx(exact_loss(m, g, *args).item())


def test_a_schedule_scales_the_learning_rate_of_each_sweep():
    def halved_square(model, guide):
        return 0.5 * guide().square()

    pyro.clear_param_store()
    factors, descent = (1.0, 0.5, 0.0, 0.2), lambda tensors: torch.optim.SGD(tensors, lr=0.5)
    block = Block("x", params=["x"], optimizer=descent, num_steps=2, loss=halved_square)
    schedule = LRSchedule(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda sweep: factors[min(sweep, 3)]))
    values = []
    record = OnStep(lambda step, loss: values.append(pyro.param("x").item()))
    how = {"optim": [block], "num_steps": 4, "callbacks": [schedule, record], "progress": False}
    fit(lambda: None, lambda: pyro.param("x", torch.tensor(1.0)), **how)
    assert values == pytest.approx(np.cumprod([(1.0 - 0.5 * factor) ** 2 for factor in factors]))
