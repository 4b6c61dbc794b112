"""Rise of a bound at the end of a fit, and whether the rise is negligible."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["MIN_STEPS", "TOLERANCE", "Gain", "estimate_gain"]

MIN_STEPS = 500
TOLERANCE = 1e-3  # nats per observed entry
_NUM_BATCHES = 10  # in a window
_TRIM = 0.2  # share of batches that is left out at each end
_NUM_ERRORS = 2.0


class Gain(NamedTuple):
    r"""Rise of the bound per observed entry between two adjacent windows of steps, with its standard error.

    A gain g with standard error s is negligible at a tolerance τ if

    .. math:: g < \tau \quad\text{and}\quad (|g| < 2 s \;\text{ or }\; |g| + 2 s < \tau),

    that is, if it is below the tolerance, and is indistinguishable from zero or distinguishable from the tolerance.  Bounds
    without noise have almost no standard error, and rise by distinguishable but small amounts for ever: these count as
    converged by the last condition.

    :param value: rise, in nats per observed entry.
    :param standard_error: its standard error.
    :param num_steps: number of steps in each window.

    >>> gain = Gain(0.004, 0.0005, num_steps=100)
    >>> print(gain)
    0.004 ± 0.0005 nats per entry over 100 steps
    >>> gain.is_significant, gain.is_negligible(0.001), gain.is_negligible(0.01)
    (True, False, True)
    """

    value: float
    standard_error: float
    num_steps: int

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.standard_error:.2g} nats per entry over {self.num_steps} steps"

    @property
    def is_significant(self) -> bool:
        """Whether the bound rose or fell by two standard errors or more."""
        return abs(self.value) >= _NUM_ERRORS * self.standard_error

    def is_negligible(self, tolerance: float) -> bool:
        """Return whether the bound has stopped rising.

        :param tolerance: largest negligible rise, in nats per observed entry.
        """
        is_below = abs(self.value) + _NUM_ERRORS * self.standard_error < tolerance
        return self.value < tolerance and (is_below or not self.is_significant)


def estimate_gain(bounds: Sequence[float] | np.ndarray, *, steps_per_epoch: int = 1) -> Gain | None:
    r"""Estimate the rise of a bound over the last tenth of its steps, by batch means.

    The last two windows, of a tenth of the steps each, are divided into 10 batches of equal length, each of one or more
    epochs, because losses of mini-batches are correlated within an epoch.  With :math:`\bar b_{1i}, \bar b_{2i}` the means of
    the bounds in batch i of the two windows, the gain and its standard error are the 20% trimmed mean of the differences
    :math:`\bar b_{2i} - \bar b_{1i}` and its standard error from their winsorised variance.  A linear trend adds the same
    number to all differences, and so changes the gain but not the standard error.  Trimmed means ignore up to two batches at
    each end: a few diverging steps, whose losses are larger by orders of magnitude, change a mean and its standard error
    so much that no rise would be significant.  Batches are trimmed, not steps, since the distribution of the losses of an
    epoch may be skewed.  The standard error is too small if losses are correlated over more steps than a batch has.

    :param bounds: estimate of the bound at each step.
    :param steps_per_epoch: number of steps in an epoch.
    :returns: the gain; None for fewer than 500 steps or 40 epochs.

    Source: Law and Carson (1979), "A sequential procedure for determining the length of a steady-state simulation", for
    batch means; Tukey and McLaughlin (1963), "Less vulnerable confidence and significance procedures for location based on a
    single sample", for the standard error.

    >>> rng = np.random.default_rng(0)
    >>> noise = rng.normal(size=1000)
    >>> print(estimate_gain(0.1 * noise))
    -0.0249 ± 0.017 nats per entry over 100 steps
    >>> print(estimate_gain(0.1 * noise + 0.01 * np.arange(1000)))
    0.975 ± 0.017 nats per entry over 100 steps
    """
    num_complete = len(bounds) // steps_per_epoch * steps_per_epoch
    epochs_per_batch = max(num_complete // (10 * _NUM_BATCHES * steps_per_epoch), 1)
    window = _NUM_BATCHES * epochs_per_batch * steps_per_epoch
    if len(bounds) < MIN_STEPS or num_complete < 4 * window:
        return None
    last = np.asarray(bounds, dtype=np.float64)[num_complete - 2 * window : num_complete]
    before, after = last.reshape(2, _NUM_BATCHES, -1).mean(-1)
    rises = after - before
    from scipy.stats import trim_mean  # imported where it is used, since scipy.stats takes half a second
    from scipy.stats.mstats import trimmed_stde

    return Gain(float(trim_mean(rises, _TRIM)), float(trimmed_stde(rises, (_TRIM, _TRIM))), window)
