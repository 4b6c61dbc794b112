"""Plots of latent means, and of the relevance of latent dimensions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.colors import LinearSegmentedColormap

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.plots._drawing import (
    INK,
    PALETTE,
    Array,
    as_array,
    as_images,
    as_labels,
    check_shape,
    clean_axes,
    color_points,
    place_images,
)

__all__ = ["plot_ard", "plot_latents", "plot_relevances"]

_RELEVANCE_MAP = LinearSegmentedColormap.from_list("relevance", ["#FFFFFF", PALETTE[0]])


@names_types
def plot_latents(
    mean: Array,
    labels: Array | None = None,
    *,
    scale: Array | None = None,
    images: Array | None = None,
    image_shape: tuple[int, ...] | None = None,
    dims: Sequence[int] | None = None,
    relevance: Array | None = None,
    num_images: int = 30,
    image_size: float | int = 0.32,
    cmap: str = "gray",
    ax: Axes | None = None,
) -> Axes:
    """Plot latent means in two dimensions, coloured by label, with standard deviations and images of the points.

    Up to ten distinct labels, or labels that are text, have a legend; other numbers have a colour bar.  Points whose label is
    missing (NaN, None, pandas' NA) are grey.

    :param mean: [N, Q] latent means.
    :param labels: [N] classes or numbers.
    :param scale: [N, Q] standard deviations; each point gets an ellipse of one standard deviation.
    :param images: [N, …] images, flat or not, of which up to ``num_images`` are shown without overlap.
    :param image_shape: (height, width) or (height, width, 3) of an image.
    :param dims: the two latent dimensions; by default the most relevant two, or the first two without ``relevance``.
    :param relevance: [Q] relevance of the latent dimensions, 1 / lengthscale.
    :param num_images: largest number of images.
    :param image_size: height of an image, in inches.
    :param cmap: colour map of images without colour; ``"gray_r"`` suits dark strokes on white.
    :param ax: axes to draw in; a new figure by default.
    :raises ValueError: if shapes do not fit.

    >>> from matplotlib import pyplot as plt
    >>> ax = plot_latents([[0.0, 1.0], [1.0, 0.0]], labels=["a", "b"])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['a', 'b']
    >>> plt.close(ax.figure)
    """
    X = as_array(mean, "mean", 2)
    if X.shape[1] < 2:
        raise ValueError(f"mean: expected [N, Q] with Q ≥ 2, got {list(X.shape)}; plot one dimension with a histogram.")
    pair, strength = _choose_dims(X.shape[1], dims, relevance)
    xy = X[:, pair]
    if scale is not None:
        sd = check_shape(as_array(scale, "scale", 2), X.shape, "scale")[:, pair]
    if labels is not None:
        labels = check_shape(as_labels(labels), (len(X),), "labels")
    if num_images < 0 or not image_size > 0:
        raise ValueError(f"expected num_images ≥ 0 and image_size > 0, got {num_images} and {image_size}; raise them.")
    pictures = None if images is None else as_images(images, image_shape, "images", len(X))
    ax = clean_axes(ax, (6.0, 5.0))
    colors = color_points(ax, labels, len(X))
    size = float(np.clip(6000 / len(X), 7, 36))
    if scale is not None:
        _draw_ellipses(ax, xy, sd, colors)
    ax.scatter(xy[:, 0], xy[:, 1], c=colors, s=size, alpha=0.85, linewidths=0, zorder=2)
    ax.margins(0.06)
    names = [f"latent {dim}" + ("" if strength is None else f"  (relevance {strength[dim]:.2g})") for dim in pair]
    ax.set_xlabel(names[0])
    ax.set_ylabel(names[1])
    if pictures is not None:
        place_images(ax, xy, pictures, colors, num_images, image_size, cmap)
    return ax


def _draw_ellipses(ax: Axes, xy: np.ndarray, sd: np.ndarray, colors: np.ndarray) -> None:
    """Draw an ellipse of one standard deviation around each point."""
    ellipses = EllipseCollection(
        2.0 * sd[:, 0],
        2.0 * sd[:, 1],
        np.zeros(len(xy)),
        units="xy",
        offsets=xy,
        offset_transform=ax.transData,
        facecolors=colors,
        alpha=0.12,
        linewidths=0,
        zorder=1,
    )
    ax.add_collection(ellipses)


@names_types
def plot_ard(relevance: Array, *, ax: Axes | None = None) -> Axes:
    """Plot the relevance of each latent dimension as a bar, largest first.

    :param relevance: [Q] relevance, 1 / lengthscale.
    :param ax: axes to draw in; a new figure by default.
    :raises ValueError: if a relevance is negative or not finite.

    >>> from matplotlib import pyplot as plt
    >>> ax = plot_ard([0.1, 2.0])
    >>> [text.get_text() for text in ax.get_xticklabels()]
    ['1', '0']
    >>> plt.close(ax.figure)
    """
    values = as_array(relevance, "relevance", 1)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"relevance: expected finite numbers ≥ 0, got {values}; pass 1 / lengthscale.")
    ax = clean_axes(ax, (max(3.0, 0.38 * len(values) + 1.2), 2.6))
    order = np.argsort(-values, kind="stable")
    ax.bar(np.arange(len(values)), values[order], width=0.72, color=PALETTE[0], linewidth=0)
    ax.set_xticks(np.arange(len(values)), [str(dim) for dim in order])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("latent dimension")
    ax.set_ylabel("relevance  (1 / lengthscale)")
    return ax


def _choose_dims(num: int, dims: Sequence[int] | None, relevance: Array | None) -> tuple[list[int], np.ndarray | None]:
    """Return the two dimensions to plot, and the relevance of all."""
    strength = None if relevance is None else check_shape(as_array(relevance, "relevance", 1), (num,), "relevance")
    pair = list(dims) if dims is not None else [0, 1] if strength is None else list(np.argsort(-strength)[:2])
    if len(pair) != 2 or len(set(pair)) != 2 or not all(0 <= dim < num for dim in pair):
        raise ValueError(f"dims: expected two different dimensions among 0 … {num - 1}, got {dims}.")
    return [int(dim) for dim in pair], strength


@names_types
def plot_relevances(relevance: Mapping[str, Array], *, threshold: float = 0.05, ax: Axes | None = None) -> Axes:
    r"""Plot the relevance of each latent dimension for each view, shared dimensions first.

    A row of the picture is a view, a column a latent dimension, the number the relevance.  Below are the names of the views
    that depend on the dimension: those whose relevance is at least ``threshold``.

    :param relevance: [Q] relevances by view, such as ``{name: model.relevance(name) for name in model.columns}`` of a
        :class:`~pyro_lvgp.models.MultiViewGPLVM`.
    :param threshold: smallest relevance on which a view depends.
    :param ax: axes to draw in; a new figure by default.
    :raises ValueError: without views, for relevances that are negative, not finite or of other numbers of dimensions.

    >>> from matplotlib import pyplot as plt
    >>> ax = plot_relevances({"sensors": [0.7, 0.0, 0.4], "label": [0.0, 0.0, 1.0]})
    >>> [text.get_text() for text in ax.get_xticklabels()]
    ['2\nshared', '0\nsensors', '1\nunused']
    >>> plt.close(ax.figure)
    """
    if not relevance:
        raise ValueError("expected relevances of one view or more, got none; pass {name: model.relevance(name), ...}.")
    rows = {name: as_array(values, f"relevance of {name!r}", 1) for name, values in relevance.items()}
    num_dims = len(next(iter(rows.values())))
    table = np.stack([check_shape(values, (num_dims,), f"relevance of {name!r}") for name, values in rows.items()])
    if not (np.isfinite(table) & (table >= 0)).all():
        raise ValueError(f"relevance: expected finite numbers ≥ 0, got {table}; pass those of model.relevance(name).")
    used = table >= threshold
    order = sorted(range(num_dims), key=lambda q: (-used[:, q].sum(), int(used[:, q].argmax()), -table[:, q].sum()))
    ax = clean_axes(ax, (max(3.6, 0.9 * num_dims + 1.4), 0.55 * len(rows) + 1.1))
    largest = max(table.max(), 1.0)
    ax.imshow(table[:, order], cmap=_RELEVANCE_MAP, vmin=0.0, vmax=largest, aspect="auto")
    for row, q in np.ndindex(table.shape):
        value = table[row, order[q]]
        ax.text(q, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.55 * largest else INK)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(range(num_dims), [f"{q}\n{_users(list(rows), used[:, q])}" for q in order])
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_xlabel("latent dimension")
    return ax


def _users(names: list[str], used: np.ndarray) -> str:
    """Describe which views depend on a dimension."""
    users = [name for name, is_used in zip(names, used, strict=True) if is_used]
    if len(users) > 1:
        return "shared" if len(users) == len(names) else ", ".join(users)
    return users[0] if users else "unused"
