"""Bounds over steps or seconds."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from pyro_lvgp.plots._drawing import PALETTE, Array, as_array, check_shape, clean_axes


def plot_bounds(
    histories: Mapping[str, Array],
    *,
    seconds: Mapping[str, Array] | None = None,
    per: float | int = 1.0,
    smooth: float | int = 0.02,
    ylabel: str = "bound",
    ax: Axes | None = None,
) -> Axes:
    """Bounds on the log evidence of several fits, against steps or seconds: raw values faint, smoothed ones on top.

    The smoothed curve is an exponential moving average over a fraction ``smooth`` of the steps, unbiased at its start.
    The vertical limits leave out the first steps, which are far below the rest.

    :param histories: the bound at every step, by name of the fit.
    :param seconds: time at every step, by name; the horizontal axis counts steps without it.
    :param per: divide by this, for instance the number of data points.
    :param smooth: time constant of the average, as a fraction of the number of steps; 0 does not smooth.
    :param ylabel: what the vertical axis shows.
    :param ax: where to draw; a new figure by default.
    :raises ValueError: if there is no history, a history is empty, or times do not match.
    :raises TypeError: for a history without a name.

    >>> from matplotlib import pyplot as plt
    >>> ax = plot_bounds({"fit": [-9.0, -3.0, -2.0]}, per=10)
    >>> ax.get_xlabel()
    'step'
    >>> plt.close(ax.figure)
    """
    if not isinstance(histories, Mapping):
        raise TypeError(f"expected histories by name, got {type(histories).__name__}; pass {{'name': bounds}}.")
    if not histories or not 0 <= smooth < 1 or not per > 0:
        raise ValueError(
            f"expected one history or more, 0 ≤ smooth < 1 and per > 0, got {len(histories)}, {smooth} and {per}; "
            "pass {'name': bounds}."
        )
    curves = {}
    for name, history in histories.items():
        bound = as_array(history, f"histories['{name}']", 1) / per
        if seconds is not None and name not in seconds:
            raise ValueError(f"seconds: expected times for every history, got none for '{name}'; add them.")
        time = np.arange(1, len(bound) + 1.0) if seconds is None else as_array(seconds[name], f"seconds['{name}']", 1)
        curves[name] = (
            check_shape(time, bound.shape, f"seconds['{name}']"),
            bound,
            _smooth(bound, smooth * len(bound)),
        )
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


def _smooth(values: np.ndarray, steps: float | int) -> np.ndarray:
    """Exponential moving average with time constant ``steps``, divided by the weight it has gathered so far."""
    decay = np.exp(-1.0 / steps) if steps > 0 else 0.0
    average, weight, result = 0.0, 0.0, np.empty_like(values)
    for i, value in enumerate(values):
        if np.isfinite(value):  # a step that failed is a gap in the raw curve only
            average, weight = decay * average + (1 - decay) * value, decay * weight + (1 - decay)
        result[i] = average / weight if weight else np.nan
    return result


def _robust_limits(bounds: list[np.ndarray]) -> tuple[float, float]:
    """From the worst bound that a fit had after its first tenth to the best one there is, but for a few of each fit."""
    late = [bound[len(bound) // 10 :] for bound in bounds]
    spans = [np.quantile(bound[finite], [0.02, 0.998]) for bound in late if (finite := np.isfinite(bound)).any()]
    if not spans:
        return 0.0, 1.0
    low, high = np.min(spans), np.max(spans)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return float(low - margin), float(high + margin)
