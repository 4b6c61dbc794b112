"""Plots of predictions over time and over space."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.plots._drawing import FAINT, INK, NUMBER_MAP, PALETTE, Array, as_array, check_shape, clean_axes

__all__ = ["plot_field", "plot_series"]


@names_types
def plot_series(
    t: Array,
    mean: Array,
    stddev: Array | None = None,
    *,
    seen: Array | None = None,
    truth: Array | None = None,
    names: Sequence[str] | None = None,
    xlabel: str = "time",
    fig: Figure | None = None,
) -> Figure:
    """Plot a panel for each output over time: data, predictions with a band of two standard deviations, hidden truth.

    :param t: [N] times, numbers or dates, in any order.
    :param mean: [N, D] predictions.
    :param stddev: [N, D] their standard deviations.
    :param seen: [N, D] data, NaN where missing.
    :param truth: [N, D] complete data, drawn where ``seen`` is NaN.
    :param names: [D] names of the outputs.
    :param xlabel: label of the time axis, with unit.
    :param fig: an empty figure or subfigure to draw in; a new figure by default.
    :raises ValueError: if shapes do not fit.

    >>> fig = plot_series([0.0, 1.0], [[1.0], [2.0]], [[0.1], [0.3]], seen=[[1.1], [np.nan]])
    >>> len(fig.axes)
    1
    >>> plt.close(fig)
    """
    centre = as_array(mean, "mean", 2)
    N, D = centre.shape
    times = check_shape(as_array(t, "t", 1, dates=True), (N,), "t")
    given = {"stddev": stddev, "seen": seen, "truth": truth}
    arrays = {
        name: check_shape(as_array(value, name, 2), centre.shape, name) for name, value in given.items() if value is not None
    }
    order = np.argsort(times, kind="stable")
    times, centre, arrays = times[order], centre[order], {name: values[order] for name, values in arrays.items()}
    labels = [f"output {d}" for d in range(D)] if names is None else list(names)
    if len(labels) != D:
        raise ValueError(f"names: expected {D}, one for each output, got {len(labels)}.")
    if fig is None:
        fig = plt.figure(figsize=(7.5, 0.95 * D + 0.7), layout="constrained")
    panels = fig.subplots(D, sharex=True, squeeze=False)[:, 0]
    for d, (ax, label) in enumerate(zip(panels, labels, strict=True)):
        _draw_output(ax, times, centre[:, d], {name: values[:, d] for name, values in arrays.items()})
        ax.set_ylabel(label, rotation=0, ha="right", va="center", fontsize="small")
        ax.margins(x=0.005)
        clean_axes(ax, (0.0, 0.0))  # after plotting, since the locator depends on whether times are dates
    panels[-1].set_xlabel(xlabel)
    handles = {label: line for ax in panels for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    return fig


def _draw_output(ax: Axes, times: np.ndarray, mean: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    """Draw the prediction of one output, and its ``stddev``, ``seen`` and ``truth`` if they are among the arrays."""
    if "stddev" in arrays:
        spread = 2.0 * arrays["stddev"]
        ax.fill_between(times, mean - spread, mean + spread, color=PALETTE[0], alpha=0.18, linewidth=0)
    if "truth" in arrays:
        unseen = np.isnan(arrays["seen"]) if "seen" in arrays else np.ones(len(times), dtype=bool)
        _draw_line(ax, times, np.where(unseen, arrays["truth"], np.nan), PALETTE[1], "hidden truth")
    _draw_line(ax, times, mean, PALETTE[0], "prediction ± 2 sd" if "stddev" in arrays else "mean")
    if "seen" in arrays:
        ax.plot(times, arrays["seen"], ".", color=INK, markersize=2.2, label="seen")


def _draw_line(ax: Axes, times: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """Draw a line with gaps where values are NaN, and a dot at each value between two gaps."""
    gaps = np.pad(np.isnan(values), 1, constant_values=True)
    alone = ~gaps[1:-1] & gaps[:-2] & gaps[2:]
    marker = "." if alone.any() else None
    ax.plot(times, values, marker=marker, markevery=alone, markersize=4.0, color=color, linewidth=1.1, label=label)


@names_types
def plot_field(
    places: Array,
    values: Array,
    *,
    grid: tuple[int, int] | None = None,
    sites: Array | None = None,
    site_values: Array | None = None,
    label: str = "value",
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot values over a plane, at scattered places or on a regular grid, with measurements in the same colours.

    :param places: [N, 2] coordinates.
    :param values: [N] values at the places.
    :param grid: (rows, columns) if the places are a regular grid, row by row, which is then filled.
    :param sites: [M, 2] coordinates of measurements.
    :param site_values: [M] measurements; without them sites are dots of one colour.
    :param label: name and unit of the values.
    :param limits: limits of the colour scale; by default the range of all values.
    :param ax: axes to draw in; a new figure by default.
    :raises ValueError: if shapes do not fit.

    >>> ax = plot_field([[0.0, 0.0], [1.0, 0.0]], [1.0, 2.0], label="cadmium [mg/kg]")
    >>> plt.close(ax.figure)
    """
    xy = as_array(places, "places", 2)
    z = check_shape(as_array(values, "values", 1), (len(xy),), "values")
    if xy.shape[1] != 2:
        raise ValueError(f"places: expected [N, 2], got {list(xy.shape)}; give two coordinates.")
    if grid is not None and grid[0] * grid[1] != len(xy):
        raise ValueError(f"grid: expected rows × columns to be {len(xy)}, the number of places, got {grid}.")
    spots = None if sites is None else as_array(sites, "sites", 2)
    measured = None
    if spots is not None and site_values is not None:
        measured = check_shape(as_array(site_values, "site_values", 1), (len(spots),), "site_values")
    all_values = z if measured is None else np.concatenate([z, measured])
    low, high = (np.nanmin(all_values), np.nanmax(all_values)) if limits is None else limits
    colours: dict[str, Any] = {"cmap": NUMBER_MAP, "vmin": low, "vmax": high}
    ax = clean_axes(ax, (5.2, 4.6))
    drawn: ScalarMappable
    if grid is None:
        drawn = ax.scatter(xy[:, 0], xy[:, 1], c=z, s=22, linewidths=0, **colours)
    else:
        shape = (*grid, 2)
        corners = xy.reshape(shape)
        drawn = ax.pcolormesh(corners[..., 0], corners[..., 1], z.reshape(grid), shading="gouraud", rasterized=True, **colours)
    if spots is not None and measured is not None:
        ax.scatter(spots[:, 0], spots[:, 1], c=measured, s=16, edgecolors="white", linewidths=0.5, **colours)
    elif spots is not None:
        ax.scatter(spots[:, 0], spots[:, 1], color=INK, s=4, linewidths=0)
    ax.set_aspect("equal")
    bar = ax.figure.colorbar(drawn, ax=ax, shrink=0.8, label=label)
    bar.ax.tick_params(color=FAINT, labelcolor=INK, labelsize="small")
    return ax
