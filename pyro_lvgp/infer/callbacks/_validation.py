"""Pyro's validation in the first epoch alone."""

from contextlib import ExitStack

import pyro

from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["ValidateFirstEpoch"]


class ValidateFirstEpoch(Callback):
    """Switch Pyro's validation off after the first epoch, or the first step if compiled, until the fit ends.

    >>> state = FitState(lambda: None, lambda: None, num_steps=1)
    >>> callback = ValidateFirstEpoch()
    >>> callback.on_start(state)
    >>> callback.on_end(state)
    """

    order = -1

    def on_start(self, state: FitState) -> None:
        """Leave validation as it is.

        :param state: the fit.
        """
        self._disabled, self._is_disabled = ExitStack(), False

    def on_step(self, state: FitState) -> None:
        """Switch validation off if the first epoch is over.

        :param state: the fit.
        """
        if not self._is_disabled and state.step >= (1 if state.is_compiled else state.batches.steps_per_epoch):
            self._disabled.enter_context(pyro.validation_enabled(False))
            self._is_disabled = True

    def on_end(self, state: FitState) -> None:
        """Restore the setting.

        :param state: the fit.
        """
        self._disabled.close()
