"""Plot of bounds over steps or seconds."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.plots._drawing import PALETTE, Array, as_array, check_shape, clean_axes

__all__ = ["plot_bounds"]


@names_types
def plot_bounds(
    histories: Mapping[str, Array],
    *,
    seconds: Mapping[str, Array] | None = None,
    per: float | int = 1.0,
    smooth: float | int = 0.02,
    ylabel: str = "bound",
    ax: Axes | None = None,
) -> Axes:
    """Plot bounds on the log evidence of several fits against steps or seconds, raw and smoothed.

    The smoothed curve is an exponential moving average over a fraction ``smooth`` of the steps, without bias at its start.
    The vertical limits exclude the first steps, whose bounds are far below the rest.

    :param histories: the bound at every step, by name of the fit.
    :param seconds: time at every step, by name; the horizontal axis counts steps without it.
    :param per: divide by this, for instance the number of data points.
    :param smooth: time constant of the average, as a fraction of the number of steps; 0 does not smooth.
    :param ylabel: label of the vertical axis.
    :param ax: axes to draw in; a new figure by default.
    :raises ValueError: if there is no history, a history is empty, or times do not match.
    :raises TypeError: for a history without a name.

    >>> from matplotlib import pyplot as plt
    >>> ax = plot_bounds({"fit": [-9.0, -3.0, -2.0]}, per=10)
    >>> ax.get_xlabel()
    'step'
    >>> plt.close(ax.figure)
    """
    _check_arguments(histories, per, smooth)
    curves = {}
    for name, history in histories.items():
        bound = as_array(history, f"histories['{name}']", 1) / per
        curves[name] = (_times(name, len(bound), seconds), bound, _smooth(bound, smooth * len(bound)))
    ax = clean_axes(ax, (6.0, 3.6))
    for i, (name, (time, bound, smoothed)) in enumerate(curves.items()):
        color = PALETTE[i % len(PALETTE)]
        if smooth:
            ax.plot(time, bound, color=color, alpha=0.16, linewidth=0.6, zorder=1)
        ax.plot(time, smoothed, color=color, linewidth=1.8, zorder=2, label=name)
    ax.set_ylim(*_robust_limits([bound for _, bound, _ in curves.values()]))
    ax.margins(x=0.01)
    ax.set_xlabel("step" if seconds is None else "seconds")
    ax.set_ylabel(ylabel)
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return ax


def _check_arguments(histories: Mapping[str, Array], per: float | int, smooth: float | int) -> None:
    """Raise an error unless there are histories by name, and the numbers are in range."""
    if not isinstance(histories, Mapping):
        raise TypeError(f"expected histories by name, got {type(histories).__name__}; pass {{'name': bounds}}.")
    if not histories or not 0 <= smooth < 1 or not per > 0:
        raise ValueError(
            f"expected one history or more, 0 ≤ smooth < 1 and per > 0, got {len(histories)}, {smooth} and {per}; "
            "pass {'name': bounds}."
        )


def _times(name: str, num_steps: int, seconds: Mapping[str, Array] | None) -> np.ndarray:
    """Return the seconds at each step of a fit, or the numbers of the steps."""
    if seconds is None:
        return np.arange(1, num_steps + 1.0)
    if name not in seconds:
        raise ValueError(f"seconds: expected times for every history, got none for '{name}'; add them.")
    return check_shape(as_array(seconds[name], f"seconds['{name}']", 1), (num_steps,), f"seconds['{name}']")


def _smooth(values: np.ndarray, steps: float | int) -> np.ndarray:
    """Compute the exponential moving average with time constant ``steps``, divided by the sum of its weights."""
    decay = np.exp(-1.0 / steps) if steps > 0 else 0.0
    average, weight, result = 0.0, 0.0, np.empty_like(values)
    for i, value in enumerate(values):
        if np.isfinite(value):  # others are gaps in the raw curve only
            average, weight = decay * average + (1 - decay) * value, decay * weight + (1 - decay)
        result[i] = average / weight if weight else np.nan
    return result


def _robust_limits(bounds: list[np.ndarray]) -> tuple[float, float]:
    """Return limits around the quantiles 0.02 and 0.998 of each fit after its first tenth."""
    late = [bound[len(bound) // 10 :] for bound in bounds]
    spans = [np.quantile(bound[finite], [0.02, 0.998]) for bound in late if (finite := np.isfinite(bound)).any()]
    if not spans:
        return 0.0, 1.0
    low, high = np.min(spans), np.max(spans)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return float(low - margin), float(high + margin)
