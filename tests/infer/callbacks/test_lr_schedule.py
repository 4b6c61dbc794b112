"""Schedules of learning rates against their formulas, for optimisers of every kind."""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from pyro_lvgp.infer import Block, Callback, Checkpoint, FitState, JointAdam, JointOptim, LRSchedule, fit
from tests.helpers.fits import Climb, OnStep, no_guide

COSINE = 0.5 * (1 + np.cos(np.pi * np.arange(8) / 8))


def factors(optim, *callbacks, lr, num_steps=8):
    """Lengths of steps along a constant gradient, in units of the first learning rate."""
    pyro.clear_param_store()
    path = [0.0]
    record = OnStep(lambda *_: path.append(pyro.param("p").item()))
    Climb().fit(optim=optim, num_steps=num_steps, callbacks=[*callbacks, record])
    return -np.diff(path) / lr


@pytest.mark.parametrize(
    "make",
    [
        lambda: JointAdam(lr=0.1),  # with a constant gradient every step of Adam is as long as its learning rate
        lambda: Adam({"lr": 0.1}),
        lambda: SGD({"lr": 0.1}),
        lambda: [Block("p", params=["p"], optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.1))],
    ],
    ids=["joint", "one each", "SGD", "blocks"],
)
def test_schedules(make):
    harmonic = LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    halved = LRSchedule(lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    np.testing.assert_allclose(factors(make(), lr=0.1), np.ones(8), rtol=1e-4)
    np.testing.assert_allclose(factors(make(), LRSchedule("cosine"), lr=0.1), COSINE, rtol=1e-3)
    np.testing.assert_allclose(factors(make(), LRSchedule(), lr=0.1), COSINE, rtol=1e-3)
    np.testing.assert_allclose(factors(make(), harmonic, lr=0.1), 1 / np.arange(1.0, 9), rtol=1e-3)
    np.testing.assert_allclose(factors(make(), halved, lr=0.1), [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125], rtol=1e-3)


@pytest.mark.parametrize("make", [lambda: JointOptim(torch.optim.SGD, {"lr": 1.0}), lambda: SGD({"lr": 1.0})])
def test_parameters_that_come_late_have_the_rate_of_their_step(make):
    steps = itertools.count()

    def model():
        total = pyro.param("a", torch.tensor(0.0))
        if next(steps):
            total = total + pyro.param("b", torch.tensor(0.0))
        pyro.factor("loss", -total)

    schedule = LRSchedule(lambda optimizer: ExponentialLR(optimizer, 0.5))
    fit(model, no_guide, optim=make(), num_steps=3, callbacks=[schedule], progress=False)
    assert pyro.param("a").item() == pytest.approx(-1.75)
    assert pyro.param("b").item() == pytest.approx(-0.75)


def test_only_blocks_that_move_by_gradient_have_a_schedule():
    def model(y):
        mean = pyro.param("a", torch.tensor(0.0)) + pyro.param("b", torch.tensor(0.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([1]).to_event(1), obs=y)

    def ends(*callbacks):
        pyro.clear_param_store()
        closed = {"update": lambda y: {"b": y[0] - pyro.param("a") + 1.0}, "damping": 0.5}
        blocks = [
            Block("a", params=["a"], optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.5)),
            Block("b", params=["b"], **closed),
        ]
        how = {"optim": blocks, "num_steps": 4, "callbacks": callbacks, "progress": False}
        losses = fit(model, no_guide, torch.tensor([3.0]), **how).losses
        return [*losses, pyro.param("a").item()]

    def formula(sweep):
        return 0.5 * (1.0 + math.cos(math.pi * sweep / 4.0))

    cosine = ends(LRSchedule("cosine"))
    assert cosine != ends()
    assert cosine == pytest.approx(ends(LRSchedule(lambda optimizer: LambdaLR(optimizer, formula))))


class Killed(Exception):
    pass


@pytest.mark.parametrize("make", [lambda: JointAdam(lr=0.1), lambda: Adam({"lr": 0.1})])
@pytest.mark.parametrize(
    "schedule",
    [
        "cosine",
        lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 5)),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=12),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, threshold=10.0),
    ],
    ids=["cosine", "step", "warm-up", "one cycle", "plateau"],
)
def test_a_schedule_goes_on_after_a_checkpoint(schedule, make, tmp_path):
    def kill(step, loss):
        if step == 6:
            raise Killed

    def fitted(*callbacks):
        pyro.clear_param_store()
        rates = []

        class Rates(Callback):
            def on_step(self, state):
                rates.extend(group["lr"] for own in state.optimizers().values() for group in own.param_groups)

        Climb().fit(optim=make(), num_steps=10, callbacks=[LRSchedule(schedule), Rates(), *callbacks])
        return rates, pyro.param("p").item()

    expected, end = fitted()
    checkpoint = Checkpoint(tmp_path / "fit.pt", every=5)
    with pytest.raises(Killed):
        fitted(checkpoint, OnStep(kill))
    rates, resumed = fitted(checkpoint)
    assert rates == expected[5:]
    assert resumed == end
    assert len(set(expected)) > 1


def test_the_next_fit_has_the_first_learning_rate():
    optim = SGD({"lr": 1.0})
    Climb().fit(optim=optim, num_steps=4, callbacks=[LRSchedule("cosine")])
    start = pyro.param("p").item()
    Climb().fit(optim=optim, num_steps=1)
    assert pyro.param("p").item() - start == pytest.approx(-1.0)
    Climb().fit(optim=optim, num_steps=4, callbacks=[LRSchedule("cosine")])
    assert pyro.param("p").item() == pytest.approx(2.0 * start - 1.0)


def test_optimisers_that_are_not_of_the_fit_have_no_schedule():
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = LRSchedule(lambda optimizer: ExponentialLR(optimizer, 0.5))
    Climb().fit(callbacks=[OnStep(lambda *_: other.step()), schedule])
    assert other.param_groups[0]["lr"] == 1.0


def test_alone():
    state = FitState(Climb().model, no_guide, optim=SGD({"lr": 1.0}), num_steps=2)
    schedule = LRSchedule(lambda optimizer: ExponentialLR(optimizer, 0.5))
    schedule.on_start(state)
    for rate in (0.5, 0.25):
        state.take_step()
        schedule.on_step(state)
        assert state.optimizers()["p"].param_groups[0]["lr"] == rate
    schedule.on_end(state)
    assert pyro.param("p").item() == -1.5
    assert schedule.state_dict()["p"]["scheduler"]["last_epoch"] == 2


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match=r"expected schedule \"cosine\" or a function of an optimiser, got 'linear'; use"):
        LRSchedule("linear")
    for wrong in (lambda step: 0.5, lambda optimizer: None):
        with pytest.raises(TypeError, match=r"to make a scheduler of an optimiser, got .*; for a function of the step, use"):
            Climb().fit(callbacks=[LRSchedule(wrong)])
