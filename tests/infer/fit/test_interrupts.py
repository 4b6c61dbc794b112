"""Interrupted fits, and bounds and gradients that are not finite."""

import itertools
import math
import signal

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.optim import SGD

from pyro_lvgp.infer import Block, JointOptim, fit
from tests.helpers.fits import Climb, OnStep, no_guide, parameter_values, same_values
from tests.infer.fit._models import make_pair


def test_interrupt_keeps_parameters_and_history(Y):
    def stop(step, loss):
        if step == 5:
            raise KeyboardInterrupt

    model, guide = make_pair(Y)
    stopped = fit(model, guide, Y, num_steps=50, progress=False, callbacks=[OnStep(stop)])
    after = parameter_values(model, guide)
    assert stopped.interrupted
    model, guide = make_pair(Y)
    six = fit(model, guide, Y, num_steps=6, progress=False)
    assert stopped.losses == six.losses
    assert len(stopped.seconds) == 6
    assert same_values(after, parameter_values(model, guide))


@pytest.mark.parametrize(("presses", "steps"), [(1, 3), (2, 2)])
def test_ctrl_c_waits_for_the_end_of_the_step_and_a_second_does_not(presses, steps):
    number = itertools.count()

    def model(y):
        p = pyro.param("p", torch.tensor(0.0))
        if next(number) == 2:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(p, 1.0), obs=y)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        history = fit(model, no_guide, torch.ones(3), num_steps=50, progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert history.interrupted
    assert len(history.losses) == steps


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("with_blocks", [False, True])
@pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_a_bound_that_is_not_finite_stops_the_fit_before_it_moves_anything(bad, what, with_blocks):
    block = Block("p", params=["p"], optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.5))
    how = {"optim": [block]} if with_blocks else {"optim": SGD({"lr": 0.5})}
    with pytest.raises(ValueError, match=rf"became {what}; parameters are those before this step.*float64"):
        Climb(3 if with_blocks else 2, bad).fit(**how)
    assert pyro.param("p").item() == pytest.approx(-1.0)
    assert pyro.param("p").grad is None


def test_a_gradient_that_is_not_finite_stops_the_fit_before_it_moves_anything():
    def model():
        p = pyro.param("p", torch.tensor(0.0))
        pyro.factor("loss", -p + pyro.param("q", torch.tensor(0.0)).abs().sqrt())  # NaN at 0

    with pytest.raises(ValueError, match="expected finite gradients, got NaN or infinity; no parameter was changed"):
        fit(model, lambda: None, num_steps=2, progress=False)
    assert pyro.param("p").item() == 0.0
    assert pyro.param("p").grad is None


def test_a_step_cut_short_leaves_no_gradient_to_the_next_fit(Y):
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyboardInterrupt

    model, guide = make_pair(Y)
    assert fit(model, guide, Y, optim=JointOptim(Interrupted, {"lr": 0.1}), num_steps=2, progress=False).interrupted
    assert all(parameter.grad is None for part in (model, guide) for parameter in part.parameters())
