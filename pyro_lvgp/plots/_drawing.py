"""Common parts of plots: conversion of arrays, style of axes, colours and thumbnails."""

from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba_array
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.ticker import AutoLocator, MaxNLocator
from torch import Tensor

# Paul Tol's "muted" scheme, safe for all common colour blindness; the first few are furthest apart.
PALETTE = ("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499", "#6E6E6E")
INK, FAINT, NUMBER_MAP = "#333333", "#B8B8B8", "viridis"

Array = Tensor | np.ndarray | Sequence


def as_array(value: Array, name: str, ndim: int | None = None, *, dates: bool = False) -> np.ndarray:
    """Convert a tensor of any device, or an array, to float64; with ``dates``, convert dates to datetime64."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().double().numpy()
    else:
        array = np.asarray(value)
        if dates and array.dtype == object and all(isinstance(time, date) for time in array.flat):
            array = array.astype("datetime64")
        if not dates or array.dtype.kind != "M":
            array = array.astype(float)
    if ndim is not None and (array.ndim != ndim or array.size == 0):
        shape = "[N]" if ndim == 1 else "[N, Q]"
        raise ValueError(f"{name}: expected an array {shape} that is not empty, got shape {list(array.shape)}.")
    return array


def check_shape(array: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return the array, or raise a ``ValueError`` if it has another shape."""
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}; give one for each.")
    return array


def as_images(images: Array, image_shape: tuple[int, ...] | None, name: str, num: int | None = None) -> np.ndarray:
    """Reshape images, flat or not, to [N, *image_shape]."""
    array = as_array(images, name)
    if image_shape is None or len(image_shape) not in (2, 3) or (len(image_shape) == 3 and image_shape[2] not in (3, 4)):
        raise ValueError(
            f"image_shape: expected (height, width), or (height, width, 3) for colour, got {image_shape}; pass it."
        )
    size = int(np.prod(image_shape))
    expected = f"[{'N' if num is None else num}, {size}]"
    if array.ndim < 2 or array[0].size != size or (num is not None and len(array) != num):
        raise ValueError(
            f"{name}: expected {expected} for images of {image_shape}, got {list(array.shape)}; check image_shape."
        )
    return array.reshape(-1, *image_shape)


def clean_axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    """Style axes with light spines on the left and at the bottom; None creates a figure of ``figsize`` inches."""
    if ax is None:
        ax = plt.subplots(figsize=figsize, layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(color=FAINT, labelcolor=INK, labelsize="small")
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set_color(INK)
        if isinstance(axis.get_major_locator(), AutoLocator):  # other locators are those of dates, log scales or the user
            axis.set_major_locator(MaxNLocator(5))
    return ax


def as_labels(labels: Array) -> np.ndarray:
    """Convert labels to an array; in lists of mixed types each label keeps its type."""
    if isinstance(labels, Tensor):
        return labels.detach().cpu().numpy()
    return np.asarray(labels, dtype=object if isinstance(labels, list | tuple) else None)


def _is_known(value: Any) -> bool:
    """Return whether a label is not missing: NaN differs from itself, and comparing pandas' NA raises an error."""
    try:
        return value is not None and bool(value == value)
    except TypeError:
        return False


def _texts(names: np.ndarray) -> list[str]:
    """Format labels; floating-point numbers have six digits if they remain distinct."""
    if np.issubdtype(names.dtype, np.floating):
        short = [f"{name:g}" for name in names]
        if len(set(short)) == len(names):
            return short
    return [str(name) for name in names]


def color_points(ax: Axes, values: np.ndarray | None, num: int) -> np.ndarray:
    """Return colours of the points, faint where the value is missing, and add a legend or colour bar to the axes."""
    if values is None:
        return to_rgba_array([PALETTE[0]] * num)
    known = np.array([_is_known(value) for value in values], dtype=bool)
    colors = to_rgba_array([FAINT] * num)
    values = np.array(values[known].tolist()) if values.dtype == object else values[known]
    names, index = np.unique(values, return_inverse=True)
    is_number = np.issubdtype(values.dtype, np.number)
    if is_number and len(names) > len(PALETTE):
        mappable = ScalarMappable(Normalize(names.min(), names.max()), NUMBER_MAP)
        bar = ax.figure.colorbar(mappable, ax=ax, pad=0.02, aspect=30)
        outline: Any = bar.outline
        outline.set_visible(False)
        bar.ax.tick_params(color=FAINT, labelcolor=INK, labelsize="small")
        colors[known] = mappable.to_rgba(values)
        return colors
    palette = to_rgba_array([PALETTE[i % len(PALETTE)] for i in range(len(names))])
    handles = [ax.scatter([], [], color=color, s=28, linewidths=0) for color in palette]
    ax.legend(
        handles,
        _texts(names),
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize="small",
        handletextpad=0.2,
        borderaxespad=0.2,
    )
    colors[known] = palette[index]
    return colors


def place_images(
    ax: Axes, xy: np.ndarray, pictures: np.ndarray, colors: Any, num_images: int, image_size: float | int, cmap: str
) -> None:
    """Place thumbnails at points that are far apart on the page, framed in the colours of the points."""
    ax.autoscale_view()
    figure = ax.figure.canvas.figure  # the whole figure, even if these axes lie in a subfigure
    figure.draw_without_rendering()  # computes the layout, and with it the positions of data on the page
    inches = figure.dpi_scale_trans.inverted().transform(ax.transData.transform(xy))
    height, width = pictures.shape[1:3]
    shape = np.array([image_size * width / height, image_size]) * 1.3  # with frame and margin
    norm = Normalize(np.nanmin(pictures), np.nanmax(pictures))
    rows = np.flatnonzero(np.isfinite(xy).all(1))  # others have no position
    for i in rows[spread_out(inches[rows] / shape, num_images)]:
        box = OffsetImage(norm(pictures[i]), cmap=cmap, zoom=72 * image_size / height, interpolation="nearest")
        frame = {"edgecolor": colors[i], "linewidth": 1.2}
        ax.add_artist(AnnotationBbox(box, xy[i], frameon=True, pad=0.12, bboxprops=frame, zorder=3))


def spread_out(points: np.ndarray, num: int) -> list[int]:
    """Select points greedily by largest distance to those selected, in the maximum norm, while it is at least one.

    The first point is the one nearest to the median.
    """
    chosen: list[int] = []
    if not len(points):
        return chosen
    distance = np.abs(points - np.median(points, axis=0)).max(1)
    best = int(distance.argmin())
    distance = np.full(len(points), np.inf)
    while len(chosen) < num and distance[best] >= 1.0:
        chosen.append(best)
        distance = np.minimum(distance, np.abs(points - points[best]).max(1))
        best = int(distance.argmax())
    return chosen
