"""Contestants: fits that are trained in turn, each with its own parameters and step times."""

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyro
import torch
from pyro.params.param_store import StateDict
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.scores import negative_bound
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer import CompiledELBO, JointOptim, fit
from pyro_lvgp.infer.elbo.base import DifferentiableELBO


class Case(NamedTuple):
    """Model, guide, bound and settings of a fit.

    :param bound: the bound to maximise.
    :param args: arguments of model and guide, with a row for each datum.
    :param batch_size: number of rows of a step; all of them if None.
    :param learning_rate: learning rate of Adam.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    bound: DifferentiableELBO | CompiledELBO
    args: tuple[Tensor, ...]
    batch_size: int | None
    learning_rate: float


def moved(case: Case, device: str) -> Case:
    """Move model, guide and data of a case to a device."""
    for part in (case.model, case.guide):
        if isinstance(part, nn.Module):
            part.to(device)
    return case._replace(args=tuple(arg.to(device) for arg in case.args))


class Contestant:
    """Fit with its own Pyro parameter store, and the wall seconds of its steps.

    :param make: function that makes the case, called once, within that store.
    :param device: device to fit on; None for that of the model and the data.
    """

    model: Any
    guide: Any

    def __init__(self, make: Callable[[], Case], *, device: str | None = None):
        self._store: StateDict = {"params": {}, "constraints": {}}
        with self.own_parameters():
            self._case = make()
            if device is not None:
                self._case = moved(self._case, device)
        self.model, self.guide = self._case.model, self._case.guide
        self._optim = JointOptim(torch.optim.Adam, {"lr": self._case.learning_rate, "fused": True})
        self.seconds: list[float] = []

    def own_parameters(self) -> AbstractContextManager:
        """Return a context in which Pyro's parameter store is that of this contestant."""
        return pyro.get_param_store().scope(self._store)

    @property
    def compile_seconds(self) -> float:
        """Seconds of the slowest step, which compiles, minus the median."""
        return max(self.seconds) - statistics.median(self.seconds)

    def train(self, num_steps: int, *, seed: int) -> list[float]:
        """Take Adam steps on shuffled mini-batches; return the wall seconds of each."""
        with self.own_parameters():
            result = fit(
                self.model,
                self.guide,
                *self._case.args,
                loss=self._case.bound,
                optim=self._optim,
                num_steps=num_steps,
                batch_size=self._case.batch_size,
                seed=seed,
                progress=False,
            )
        seconds = np.diff(result.seconds, prepend=0.0).tolist()
        self.seconds += seconds
        return seconds

    def negative_bound(self, *, num_evaluations: int, seed: int = 0) -> float:
        """Compute minus the bound on all data per datum, averaged over draws of all sites that are not marginalised."""
        with self.own_parameters(), seeded(seed):
            return negative_bound(self._case.bound, self.model, self.guide, *self._case.args, draws=num_evaluations)


class Trainable(Protocol):
    """Method that can be trained step by step."""

    def train(self, num_steps: int, *, seed: int) -> list[float]:
        """Take steps; return the wall seconds of each."""
        ...


def train_in_turn(
    methods: Mapping[str, Trainable], num_steps: int, *, block: int, seed: int, description: str
) -> dict[str, list[float]]:
    """Train methods alternately, a block of steps each, and return the wall seconds of all steps by name.

    :param methods: methods by name.
    :param num_steps: number of steps of each method.
    :param block: number of steps of a method before the next one continues.
    :param seed: seed of mini-batches and noise.
    :param description: text of the progress bar.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    with tqdm(total=num_steps * len(methods), desc=description, unit="step") as bar:
        for done in range(0, num_steps, block):
            for name, method in methods.items():
                steps = min(block, num_steps - done)
                seconds[name] += method.train(steps, seed=seed * num_steps + done)
                bar.update(steps)
    return seconds
