"""Base class of callbacks."""

from typing import Any, ClassVar

from pyro_lvgp.infer._fit_state import FitState

__all__ = ["Callback"]


class Callback:
    """Hooks of the training loop, of which subclasses override those they need.

    :func:`~pyro_lvgp.infer.fit` calls :meth:`on_start` of all its callbacks, :meth:`on_step` after each step, and at last, in
    reverse order, :meth:`on_end`, also where an error ends the fit.  What a callback must remember if the fit goes on from a
    :class:`~pyro_lvgp.infer.Checkpoint` is in :meth:`state_dict`.

    Callbacks of a lower ``order`` come first, others as they were given: before all others
    :class:`~pyro_lvgp.infer.Distributed`, after them :class:`~pyro_lvgp.infer.Checkpoint`, which reads its file in its
    :meth:`on_start`.

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
