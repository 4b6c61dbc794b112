"""A model, a guide and a bound of ours that are trained by turns with others."""

from contextlib import AbstractContextManager

import numpy as np
import pyro
import torch
from jaxtyping import Float
from pyro.params.param_store import StateDict
from torch import Tensor

from benchmarks.scores import negative_bound
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import CompiledELBO, JointOptim, LocalELBO
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.training import fit


class Contestant:
    """What a fit needs, with a Pyro parameter store to itself; subclasses make ``model`` and ``guide`` in it.

    :param Y: all data.
    :param loss: the bound.
    :param batch_size: rows of a step; all of them if None.
    :param compile: compile the bound and its gradients.
    """

    model: BayesianGPLVM
    guide: MeanFieldGuide | AutoAnnealedLangevin

    def __init__(
        self,
        Y: Float[Tensor, "N D"],
        loss: LocalELBO,
        *,
        batch_size: int | None,
        learning_rate: float,
        compile: bool = False,
    ):
        self._Y, self._loss, self._batch_size = Y, loss, batch_size
        self._climbed = CompiledELBO(loss) if compile else loss
        self._store: StateDict = {"params": {}, "constraints": {}}
        self._optim = JointOptim(torch.optim.Adam, {"lr": learning_rate, "fused": True})

    def own_parameters(self) -> AbstractContextManager:
        """Where Pyro's parameters are those of this one."""
        return pyro.get_param_store().scope(self._store)

    def train(self, num_steps: int, *, seed: int) -> list[float]:
        """Take Adam steps on shuffled mini-batches; return the wall seconds of each."""
        with self.own_parameters():
            result = fit(
                self.model,
                self.guide,
                self._Y,
                loss=self._climbed,
                optim=self._optim,
                num_steps=num_steps,
                batch_size=self._batch_size,
                seed=seed,
                progress=False,
            )
        return np.diff(result.seconds, prepend=0.0).tolist()

    def negative_bound(self, *, num_evaluations: int, seed: int = 0) -> float:
        """Minus the bound on all data per datum, averaged over draws of all that it does not integrate."""
        with self.own_parameters(), torch.random.fork_rng():
            torch.manual_seed(seed)
            return negative_bound(self._loss, self.model, self.guide, self._Y, draws=num_evaluations)
