"""Early stopping on a validation score."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Early stopping on a validation score; the fit ends with the parameters of the lowest score.

    The bound of a decoder that overfits continues to rise, while the score of held-out entries becomes worse.

    :param score: function without arguments to minimise, such as the negative log density of held-out entries.  It has the
        same random numbers at every call, and does not change those of the fit.
    :param every: number of steps between two evaluations; the parameters after the last step are scored too.
    :param patience: number of evaluations without a new lowest score after which the fit stops; None takes all steps.
    :raises ValueError: if ``every`` or ``patience`` is below 1.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> from pyro_lvgp.infer import fit
    >>> Y = torch.randn(20, 3)
    >>> held_out = torch.rand(20, 3) < 0.1
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide, seen = MeanFieldGuide(model), Y.masked_fill(held_out, torch.nan)
    >>> def error():
    ...     return (model.reconstruct(guide, seen).mean - Y)[held_out].square().mean().item()
    >>> history = fit(model, guide, seen, num_steps=6, callbacks=[EarlyStopping(error, every=2)], progress=False)
    >>> [step for step, _ in history.scores]
    [2, 4, 6]

    Source: Prechelt (1998), "Early stopping – but when?".
    """

    @checks_types
    def __init__(self, score: Callable[[], float], *, every: int = 100, patience: int | None = None):
        check_sizes(every=every)
        if patience is not None:
            check_sizes(patience=patience)
        self.score, self.every, self.patience = score, every, patience

    def on_start(self, state: FitState) -> None:
        """Start without scores.

        :param state: the fit.
        """
        self._state, self._best = state, dict[str, Tensor]()
        self._scores = state.history.scores

    def on_step(self, state: FitState) -> None:
        """Evaluate the score every ``every`` steps, copy the parameters if it is the lowest, and stop after ``patience``.

        :param state: the fit.
        :raises ValueError: if the score is NaN.
        """
        if state.step % self.every and not state.is_finished:
            return
        with seeded(0):
            score = state.processes.mean(float(self.score()))
        if math.isnan(score):
            raise ValueError(
                f"expected a score to minimise, got NaN after {state.step} steps; does it use entries that are missing?"
            )
        self._scores.append((state.step, score))
        if self._evaluations_since_best == 0:
            self._best = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
        self._stop_after_patience()

    def on_end(self, state: FitState) -> None:
        """Restore the best parameters and buffers, if any were scored.

        :param state: the fit.
        """
        tensors = state.tensors()
        with torch.no_grad():
            for name, value in self._best.items():
                tensors[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scores, and the best parameters and buffers."""
        return {"scores": self._scores, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scores and best parameters, and stop at once if ``patience`` was exceeded.

        :param state: returned by :meth:`state_dict`.
        """
        self._scores[:], self._best = state["scores"], state["best"]
        self._stop_after_patience()

    def _stop_after_patience(self) -> None:
        if self.patience is not None and self._evaluations_since_best >= self.patience:
            self._state.stop()

    @property
    def _evaluations_since_best(self) -> int:
        best = min(range(len(self._scores)), key=lambda i: self._scores[i][1], default=-1)
        return len(self._scores) - 1 - best
