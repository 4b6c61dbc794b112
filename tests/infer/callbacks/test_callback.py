"""Callbacks of a user's own, and the order in which callbacks are called."""

import pyro
import pytest
import torch
from pyro.infer.util import is_validation_enabled
from pyro.optim import SGD

from pyro_lvgp.infer import Block, BlockCoordinateVI, Callback, Checkpoint, FitState, JointOptim, fit
from pyro_lvgp.infer.callbacks._interrupts import StopOnInterrupt
from pyro_lvgp.infer.callbacks._validation import ValidateFirstEpoch
from tests.helpers.fits import Climb, OnStep, no_guide


class Log(Callback):
    """Writes down by what name, when and at which step it is called."""

    def __init__(self, name, log, order=0, fail_at=None):
        self.name, self.log, self.order, self.fail_at = name, log, order, fail_at

    def on_start(self, state):
        self.log.append((self.name, "start", state.step))

    def on_step(self, state):
        self.log.append((self.name, "step", state.step))
        if state.step == self.fail_at:
            raise ArithmeticError("of a user's own")

    def on_end(self, state):
        self.log.append((self.name, "end", state.step))


class CountSteps(Callback):
    """A state that a checkpoint must know."""

    count = 0

    def on_step(self, state):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_callbacks_are_called_in_order_and_end_in_reverse():
    log = []
    Climb().fit(num_steps=1, callbacks=[Log("a", log), Log("b", log), Log("first", log, order=-1)])
    names = ["first", "a", "b"]
    assert [name for name, _, _ in log] == [*names, *names, *reversed(names)]
    assert [(when, step) for _, when, step in log] == 3 * [("start", 0)] + 3 * [("step", 1)] + 3 * [("end", 1)]


def test_an_error_of_a_callback_ends_those_that_started():
    log = []
    with pytest.raises(ArithmeticError, match="of a user's own"):
        Climb().fit(callbacks=[Log("a", log), Log("b", log, fail_at=2)])
    assert log[-4:] == [("a", "step", 2), ("b", "step", 2), ("b", "end", 2), ("a", "end", 2)]

    class Unfit(Callback):
        def on_start(self, state):
            raise ValueError("unfit")

    log.clear()
    with pytest.raises(ValueError, match="unfit"):
        Climb().fit(callbacks=[Log("a", log), Unfit(), Log("b", log)])
    assert log == [("a", "start", 0), ("a", "end", 0)]


def test_a_callback_may_stop_the_fit():
    class StopAt(Callback):
        def on_step(self, state):
            if state.step == 3:
                state.stop()

    history = Climb().fit(num_steps=10, callbacks=[StopAt()])
    assert len(history.losses) == 3
    assert not history.interrupted


def test_a_checkpoint_saves_the_states_of_all_callbacks(tmp_path):
    for num_steps, expected in ((3, (3, 3)), (5, (5, 5))):
        pyro.clear_param_store()
        counts = CountSteps(), CountSteps()
        Climb().fit(num_steps=num_steps, callbacks=[*counts, Checkpoint(tmp_path / "fit.pt")])
        assert (counts[0].count, counts[1].count) == expected
    other = CountSteps()
    other.name = "of another fit"
    Climb().fit(num_steps=5, callbacks=[Checkpoint(tmp_path / "fit.pt")])  # without those that it has states of


def test_callbacks_do_nothing_by_default():
    state, callback = FitState(Climb().model, no_guide, num_steps=1), Callback()
    callback.on_start(state)
    state.take_step()
    callback.on_step(state)
    callback.on_end(state)
    callback.load_state_dict(callback.state_dict())
    assert callback.state_dict() == {}
    assert state.history.losses == [0.0]


def test_validation_ends_with_the_first_epoch():
    state, callback = FitState(Climb().model, no_guide, torch.zeros(6, 1), num_steps=5, batch_size=3), ValidateFirstEpoch()
    with pyro.validation_enabled(True):
        callback.on_start(state)
        found = []
        for _ in range(3):
            state.take_step()
            callback.on_step(state)
            found.append(is_validation_enabled())
        callback.on_end(state)
        assert found == [True, False, False]
        assert is_validation_enabled()


def test_without_ctrl_c_nothing_stops():
    state, callback = FitState(Climb().model, no_guide, num_steps=5), StopOnInterrupt()
    callback.on_start(state)
    state.take_step()
    callback.on_step(state)
    assert not state.is_finished
    callback.on_end(state)


class TestFitState:
    def test_tensors_go_by_their_path(self):
        class Model(pyro.nn.PyroModule):
            def __init__(self):
                super().__init__("any")
                self.net = pyro.nn.PyroModule[torch.nn.BatchNorm1d](2)
                self.scale = pyro.nn.PyroParam(torch.tensor(2.0), pyro.distributions.constraints.positive)

            def forward(self):
                pyro.factor("loss", -self.scale * pyro.param("own", torch.tensor(1.0)) + self.net.weight.sum())

        state = FitState(Model(), no_guide, num_steps=2)
        assert sorted(state.parameters()) == ["model.net.bias", "model.net.weight", "model.scale"]
        state.initialize_parameters()
        assert sorted(state.parameters()) == ["model.net.bias", "model.net.weight", "model.scale", "own"]
        assert state.step == 0
        assert "model.net.running_mean" in state.tensors()
        assert state.parameters()["model.scale"].item() == pytest.approx(torch.tensor(2.0).log().item())

    def test_optimisers_are_made_when_they_are_needed(self):
        def model():
            pyro.factor("loss", -pyro.param("a", torch.tensor(0.0)) - pyro.param("b", torch.tensor(0.0)))

        for optim, names in ((SGD({"lr": 1.0}), ["a", "b"]), (JointOptim(torch.optim.SGD, {"lr": 1.0}), ["a"])):
            state = FitState(model, no_guide, optim=optim, num_steps=1)
            assert state.optimizers() == {}
            state.take_step()
            assert list(state.optimizers()) == names
        block = Block("both", params=["*"], optimizer=lambda tensors: torch.optim.SGD(tensors, lr=1.0))
        state = FitState(model, no_guide, optim=[block], num_steps=1)
        state.take_step()
        assert isinstance(state.svi, BlockCoordinateVI)
        assert list(state.optimizers()) == ["both"]


def test_a_fit_of_no_steps_calls_only_start_and_end():
    log = []
    history = fit(Climb().model, no_guide, num_steps=0, callbacks=[Log("a", log), OnStep(None)], progress=False)
    assert log == [("a", "start", 0), ("a", "end", 0)]
    assert history.losses == []
