"""Pyro's validation during the first epoch only."""

from contextlib import ExitStack

import pyro

from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["ValidateFirstEpoch"]


class ValidateFirstEpoch(Callback):
    """Disable Pyro's validation after the first epoch, or after the first step if compiled, until the fit ends.

    >>> state = FitState(lambda: None, lambda: None, num_steps=1)
    >>> callback = ValidateFirstEpoch()
    >>> callback.on_start(state)
    >>> callback.on_end(state)
    """

    order = -1

    def on_start(self, state: FitState) -> None:
        """Prepare to disable validation.

        :param state: the fit.
        """
        self._disabled, self._is_disabled = ExitStack(), False

    def on_step(self, state: FitState) -> None:
        """Disable validation after the first epoch.

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
