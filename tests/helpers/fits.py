"""Models of small fits, and their parameters."""

import math

import pyro
import torch
from pyro.infer.util import is_validation_enabled

from pyro_lvgp.infer import Callback, fit


def parameter_values(*modules):
    return {f"{i}.{name}": p.detach().clone() for i, m in enumerate(modules) for name, p in m.named_parameters()}


def same_values(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


class Climb:
    """Log density -p: constant gradient; records how it was called and whether Pyro validates."""

    def __init__(self, bad_at=math.inf, bad=math.nan):
        self.batches, self.validated, self.bad_at, self.bad = [], [], bad_at, bad

    def model(self, *args):
        p = pyro.param("p", torch.tensor(0.0))
        pyro.factor("loss", -p + (self.bad if len(self.batches) == self.bad_at else 0.0))
        self.batches.append(args)
        self.validated.append(is_validation_enabled())

    def guide(self, *args):
        pass

    def fit(self, *args, **kwargs):
        return fit(self.model, self.guide, *args, **{"num_steps": 4, "progress": False} | kwargs)


class OnStep(Callback):
    """Calls a function with the index and the loss of each step."""

    def __init__(self, function):
        self.function = function

    def on_step(self, state):
        self.function(state.step - 1, state.history.losses[-1])


def no_guide(*args):
    pass
