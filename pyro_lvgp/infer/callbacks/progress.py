"""The progress bar of a fit."""

import math

from tqdm.auto import tqdm

_FORGETTING = 0.05


class Progress:
    """A bar with the bound per observed entry, averaged over the last twenty steps or so.

    :param num_steps: number of steps.
    :param num_entries: number of observed entries.
    :param shown: whether there is a bar.

    >>> with Progress(2, 10, shown=False) as progress:
    ...     progress.advance(1.0)
    """

    def __init__(self, num_steps: int, num_entries: int, *, shown: bool):
        self._bar = tqdm(total=num_steps, disable=not shown, unit="step")
        self._num_entries, self._smoothed = num_entries, math.nan

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def start_at(self, step: int) -> None:
        """Count from a step.

        :param step: number of steps taken before.
        """
        self._bar.n = self._bar.initial = step

    def advance(self, loss: float, note: str = "") -> None:
        """Take note of a step.

        :param loss: minus the bound.
        :param note: what to say at once.
        """
        self._smoothed = loss if math.isnan(self._smoothed) else self._smoothed + _FORGETTING * (loss - self._smoothed)
        self._bar.set_postfix_str(f"bound/entry {-self._smoothed / self._num_entries:.4f}{note}", refresh=bool(note))
        self._bar.update()

    def say(self, message: str) -> None:
        """Write a line above the bar.

        :param message: the line.
        """
        self._bar.write(message)
