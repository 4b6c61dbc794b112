"""Stopping when the bound has converged."""

import math
from typing import Any

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._convergence import MIN_STEPS, TOLERANCE
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["StopOnConvergence"]

_NEW_SHARE = 0.1  # of the steps, so that the last window of a check has no step of those before


class StopOnConvergence(Callback):
    """Stop when the bound no longer rises.

    The first check is after 500 steps, and each next one when a tenth of the steps are new.  A check passes if
    :attr:`FitResult.gain`, the rise of the bound over the last tenth of the steps, is negligible at ``tolerance``
    (:meth:`Gain.is_negligible`).  The fit stops after ``patience`` checks in a row that pass.  Windows grow with the fit, so
    that a slow rise becomes visible.  A rise below two standard errors does not: ``history.gain`` has the standard error.

    ``fit(..., num_steps="auto")`` has one by default.

    :param tolerance: rise per observed entry, in nats, over a tenth of the steps, below which a check may pass.
    :param patience: number of checks in a row that pass.
    :raises ValueError: if ``tolerance`` is not positive and finite, or ``patience`` is below 1.

    >>> import pyro, torch
    >>> from pyro_lvgp.infer import fit
    >>> def model():
    ...     pyro.factor("loss", -(pyro.param("p", torch.tensor(1.0)) - 2.0).square())
    >>> history = fit(model, lambda: None, num_steps=5000, callbacks=[StopOnConvergence()], progress=False)
    >>> len(history.losses), history.converged
    (556, True)
    """

    order = -1  # before EarlyStopping, which scores the parameters after the last step

    @checks_types
    def __init__(self, tolerance: float = TOLERANCE, *, patience: int = 2):
        check_sizes(patience=patience)
        if not 0.0 < tolerance < math.inf:
            raise ValueError(f"expected a positive and finite tolerance, got {tolerance}; it is in nats per observed entry")
        self.tolerance, self.patience = tolerance, patience

    def on_start(self, state: FitState) -> None:
        """Start without checks.

        :param state: the fit.
        """
        self._state, self._next_check, self._num_passed = state, MIN_STEPS, 0
        state.history.tolerance = self.tolerance

    def on_step(self, state: FitState) -> None:
        """Check the gain if a check is due, and stop the fit after ``patience`` checks in a row that pass.

        :param state: the fit.
        """
        if state.step >= self._next_check:
            self._next_check = math.ceil(state.step / (1.0 - _NEW_SHARE))
            self._num_passed = self._num_passed + 1 if state.history.converged else 0
            self._stop_after_patience()

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the next check, and the number of checks passed in a row."""
        return {"next_check": self._next_check, "num_passed": self._num_passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, and stop at once if ``patience`` was reached.

        :param state: returned by :meth:`state_dict`.
        """
        self._next_check, self._num_passed = state["next_check"], state["num_passed"]
        self._stop_after_patience()

    def _stop_after_patience(self) -> None:
        if self._num_passed >= self.patience:
            self._state.stop()
