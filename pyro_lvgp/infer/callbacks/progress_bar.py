"""Progress bar of a fit."""

import math

from tqdm.auto import tqdm

from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["ProgressBar"]

_UPDATE_RATE = 0.05


class ProgressBar(Callback):
    """Progress bar with the bound per observed entry, in nats, as an exponential average over about twenty steps.

    With several processes only the first shows it.  :func:`~pyro_lvgp.infer.fit` adds one with ``progress=True``.

    >>> ProgressBar().on_start(FitState(lambda: None, lambda: None, num_steps=0))
    """

    order = 3

    def on_start(self, state: FitState) -> None:
        """Open the bar at the number of steps taken.

        :param state: the fit.
        """
        self._mean_loss, self._num_before = math.nan, state.step
        hidden = state.processes.rank > 0
        self._bar = tqdm(total=state.num_steps, initial=state.step, disable=hidden, unit="step")

    def on_step(self, state: FitState) -> None:
        """Advance the bar by a step.

        :param state: the fit.
        """
        loss = state.history.losses[-1]
        self._mean_loss = loss if math.isnan(self._mean_loss) else self._mean_loss + _UPDATE_RATE * (loss - self._mean_loss)
        compiles_next = state.is_compiled and state.step == self._num_before + 1
        note = " (compiling)" if compiles_next else ""
        bound = -self._mean_loss / state.history.num_entries
        self._bar.set_postfix_str(f"bound/entry {bound:.4f}{note}", refresh=compiles_next)
        self._bar.update()

    def on_end(self, state: FitState) -> None:
        """Close the bar.

        :param state: the fit.
        """
        self._bar.close()
