"""History of a fit."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyro_lvgp.infer._convergence import TOLERANCE, Gain, estimate_gain

__all__ = ["FitResult"]


@dataclass
class FitResult:
    """History of a fit.

    :param num_entries: number of observed entries of the data.
    :param losses: minus the bound, in nats for all data, estimated at each step.
    :param seconds: seconds since the start, after each step.
    :param interrupted: whether Ctrl-C ended the fit early.
    :param scores: with :class:`~pyro_lvgp.infer.EarlyStopping`, pairs of the number of steps taken and the score.
    :param steps_per_epoch: number of steps in which each row is used once.
    :param tolerance: rise of the bound per observed entry, in nats, below which :attr:`converged` may be true; that of
        :class:`~pyro_lvgp.infer.StopOnConvergence` if the fit has one.

    >>> history = FitResult(num_entries=10, losses=[20.0, 15.0])
    >>> history.bounds_per_entry
    array([-2. , -1.5])
    >>> print(history.gain, history.converged)
    None None
    >>> rising = FitResult(num_entries=10, losses=[-0.5 * step for step in range(1000)])
    >>> print(rising.gain, rising.converged)
    5 ± 0 nats per entry over 100 steps False
    """

    num_entries: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    interrupted: bool = False
    scores: list[tuple[int, float]] = field(default_factory=list)
    steps_per_epoch: int = 1
    tolerance: float = TOLERANCE

    def state_dict(self) -> dict[str, Any]:
        """Return losses and seconds."""
        return {"losses": self.losses, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore losses and seconds.

        :param state: returned by :meth:`state_dict`.
        """
        self.losses, self.seconds = state["losses"], state["seconds"]

    @property
    def bounds_per_entry(self) -> np.ndarray:
        """Bound per observed entry, in nats, at each step."""
        return -np.asarray(self.losses) / self.num_entries

    @property
    def gain(self) -> Gain | None:
        """Rise of the bound per observed entry over the last tenth of the steps, with its standard error.

        The mean over the last tenth is compared with that over the tenth before.  With long epochs both windows are longer:
        they have at least ten epochs.  Losses are averaged over batches of at least an epoch, and trimmed means over batches
        ignore a few diverging steps.  None for fewer than 500 steps or 40 epochs.
        """
        return estimate_gain(self.bounds_per_entry, steps_per_epoch=self.steps_per_epoch)

    @property
    def converged(self) -> bool | None:
        """Whether the gain is negligible (:meth:`Gain.is_negligible`); None for too few steps to say.

        A learning rate that falls to zero, as by :class:`~pyro_lvgp.infer.LRSchedule`, makes any bound flat: look at a fit
        with a constant rate.
        """
        return None if (gain := self.gain) is None else gain.is_negligible(self.tolerance)
