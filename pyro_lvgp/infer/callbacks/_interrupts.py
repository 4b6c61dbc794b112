"""Interrupts of a fit by Ctrl-C, at the end of a step."""

from contextlib import ExitStack

from pyro_lvgp._utils.interrupts import Interrupts
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["StopOnInterrupt"]


class StopOnInterrupt(Callback):
    """Stop the fit after the step during which Ctrl-C was pressed, in any of its processes.

    >>> state = FitState(lambda: None, lambda: None, num_steps=1)
    >>> callback = StopOnInterrupt()
    >>> callback.on_start(state)
    >>> callback.on_end(state)
    """

    order = 1

    def on_start(self, state: FitState) -> None:
        """Install a handler of SIGINT.

        :param state: the fit.
        """
        self._stack = ExitStack()
        self._interrupts = self._stack.enter_context(Interrupts())

    def on_step(self, state: FitState) -> None:
        """Stop the fit if Ctrl-C was pressed.

        :param state: the fit.
        """
        if state.processes.any(self._interrupts.received):
            state.history.interrupted = True
            state.stop()

    def on_end(self, state: FitState) -> None:
        """Restore the previous handler, and record Ctrl-C after the last step.

        :param state: the fit.
        """
        self._stack.close()
        state.history.interrupted |= self._interrupts.received
