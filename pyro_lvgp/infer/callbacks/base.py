"""Base class of the callbacks of a fit."""

from typing import Any, ClassVar

from pyro_lvgp.infer._fit_state import FitState

__all__ = ["Callback"]


class Callback:
    """Base class of callbacks; subclasses override the methods that they need.

    :func:`~pyro_lvgp.infer.fit` calls :meth:`on_start` of all its callbacks before the first step, :meth:`on_step` after each
    step, and :meth:`on_end`, in reverse order, when the fit ends, also by an error.  A :class:`~pyro_lvgp.infer.Checkpoint`
    saves :meth:`state_dict`, and a fit that resumes from it calls :meth:`load_state_dict`.

    The class attribute ``order`` sorts the callbacks of a fit, lowest first; those of one ``order`` are called in the order of
    the list.  :class:`~pyro_lvgp.infer.Distributed` has a lower ``order`` than the default 0, and
    :class:`~pyro_lvgp.infer.Checkpoint`, which reads its file in :meth:`on_start`, a higher one.

    >>> import pyro, torch
    >>> from pyro_lvgp.infer import fit
    >>> class StopBelow(Callback):
    ...     def __init__(self, loss):
    ...         self.loss = loss
    ...     def on_step(self, state):
    ...         if state.history.losses[-1] < self.loss:
    ...             state.stop()
    >>> def model():
    ...     pyro.factor("loss", -pyro.param("p", torch.tensor(1.0)).square())
    >>> history = fit(model, lambda: None, callbacks=[StopBelow(0.9)], progress=False)
    >>> len(history.losses)
    7
    """

    order: ClassVar[int] = 0
    """Position among the callbacks of a fit, lowest first."""

    def on_start(self, state: FitState) -> None:
        """Prepare for a fit, before its first step.

        :param state: the fit.
        """

    def on_step(self, state: FitState) -> None:
        """Act after a step.

        :param state: the fit.
        """

    def on_end(self, state: FitState) -> None:
        """Act when the fit ends, also by an error.

        :param state: the fit.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves; nothing by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; called after :meth:`on_start`.

        :param state: returned by :meth:`state_dict`.
        """
