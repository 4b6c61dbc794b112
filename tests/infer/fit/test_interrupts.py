"""Interrupted fits, and bounds and gradients that are not finite."""

import itertools
import math
import signal
import subprocess
import sys

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


FIT = """
import os, signal, sys
import torch
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import Callback, Checkpoint, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM

signal.signal(signal.SIGINT, signal.default_int_handler)
Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

def press(times):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)

def fitted(num_steps, *callbacks):
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)
    loss = MeanFieldELBO(max_plate_nesting=1)
    return fit(model, MeanFieldGuide(model), Y, loss=loss, num_steps=num_steps, callbacks=callbacks, progress=False)
"""
WHILE_IMPORTING = """
class PressDuringImports:
    count = 0

    def find_spec(self, name, path=None, target=None):
        self.count += 1
        if self.count in (5, 50):
            press(2)

BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4).initialize(Y)  # imports scikit-learn, outside of a fit
finder = PressDuringImports()
sys.meta_path.insert(0, finder)
history = fitted(20)
sys.meta_path.remove(finder)
assert finder.count > 50, "expected lazy imports in the first step"
assert (history.interrupted, len(history.losses)) == (True, 1), history
assert len(fitted(3).losses) == 3
"""
WHILE_SAVING = """
from pathlib import Path

path = Path(sys.argv[1])
save, load = torch.save, torch.load

def pressed(do, times):
    def during(*args, **options):
        press(times)
        return do(*args, **options)
    return during

for presses in (1, 2, 3):
    torch.save = pressed(save, presses)
    history = fitted(9, Checkpoint(path, every=1))
    torch.save = save
    assert (history.interrupted, len(history.losses)) == (True, presses + 1), (presses, history)
    assert len(load(path, weights_only=True)["history"]["losses"]) == presses + 1

fitted(4, Checkpoint(path))
torch.load = pressed(load, 1)
history = fitted(4, Checkpoint(path))
assert (history.interrupted, len(history.losses)) == (True, 4), "finished, but interrupted"
torch.load = pressed(load, 2)
try:
    fitted(6, Checkpoint(path))
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("swallowed")
torch.load = load
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert len(fitted(6, Checkpoint(path)).losses) == 6
"""


@pytest.mark.parametrize("script", [WHILE_IMPORTING, WHILE_SAVING], ids=["importing", "saving"])
def test_ctrl_c_leaves_nothing_half_done(script, tmp_path):
    command = [sys.executable, "-c", FIT + script, str(tmp_path / "fit.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
