"""Pictures of latent spaces, relevances, bounds and reconstructions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from pyro_lvgp._drawing import (
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
    """Scatter latent means in two dimensions, coloured by label, with uncertainty and images where they lie.

    Up to ten distinct labels, or labels that are text, make a legend; other numbers make a colour bar.

    :param mean: [N, Q] latent means.
    :param labels: [N] classes or numbers.
    :param scale: [N, Q] standard deviations; each point gets an ellipse of one standard deviation.
    :param images: [N, …] images, flat or not, of which up to ``num_images`` are shown, spread out so as not to overlap.
    :param image_shape: (height, width) or (height, width, 3) of an image.
    :param dims: the two latent dimensions; by default the most relevant two, or the first two without ``relevance``.
    :param relevance: [Q] relevance of the latent dimensions, 1 / lengthscale.
    :param num_images: most images to show.
    :param image_size: height of an image, in inches.
    :param cmap: colour map of images without colour; ``"gray_r"`` suits dark strokes on white.
    :param ax: where to draw; a new figure by default.
    :raises ValueError: if shapes do not fit.

    >>> ax = plot_latents([[0.0, 1.0], [1.0, 0.0]], labels=["a", "b"])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['a', 'b']
    >>> plt.close(ax.figure)
    """
    X = as_array(mean, "mean", 2)
    if X.shape[1] < 2:
        raise ValueError(f"mean: expected [N, Q] with Q ≥ 2, got {list(X.shape)}; plot one dimension with a histogram.")
    pair, strength = _choose(X.shape[1], dims, relevance)
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
        ax.add_collection(
            EllipseCollection(
                2.0 * sd[:, 0],
                2.0 * sd[:, 1],
                np.zeros(len(X)),
                units="xy",
                offsets=xy,
                offset_transform=ax.transData,
                facecolors=colors,
                alpha=0.12,
                linewidths=0,
                zorder=1,
            )
        )
    ax.scatter(xy[:, 0], xy[:, 1], c=colors, s=size, alpha=0.85, linewidths=0, zorder=2)
    ax.margins(0.06)
    names = [f"latent {dim}" + ("" if strength is None else f"  (relevance {strength[dim]:.2g})") for dim in pair]
    ax.set_xlabel(names[0])
    ax.set_ylabel(names[1])
    if pictures is not None:
        place_images(ax, xy, pictures, colors, num_images, image_size, cmap)
    return ax


def plot_ard(relevance: Array, *, ax: Axes | None = None) -> Axes:
    """Bars of the relevance of every latent dimension, largest first.

    :param relevance: [Q] relevance, 1 / lengthscale.
    :param ax: where to draw; a new figure by default.
    :raises ValueError: if a relevance is negative or not finite.

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

    >>> ax = plot_bounds({"fit": [-9.0, -3.0, -2.0]}, per=10)
    >>> ax.get_xlabel()
    'step'
    >>> plt.close(ax.figure)
    """
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
    ax.set_ylim(*_robust_limits([(bound, smoothed) for _, bound, smoothed in curves.values()]))
    ax.margins(x=0.01)
    ax.set_xlabel("step" if seconds is None else "seconds")
    ax.set_ylabel(ylabel)
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return ax


def plot_reconstructions(
    Y: Array,
    Y_hat: Array,
    image_shape: tuple[int, ...],
    *,
    Y_masked: Array | None = None,
    sd: Array | None = None,
    num: int = 10,
    cmap: str = "gray",
    fig: Figure | None = None,
) -> Figure:
    """Rows of images: the original, what the model saw of it, its reconstruction, and how sure of it the model is.

    All images share the colour scale of ``Y``; standard deviations have their own, from zero.  What is missing (NaN) is
    shown in colour.

    :param Y: [N, …] images, flat or not.
    :param Y_hat: [N, …] reconstructions.
    :param image_shape: (height, width) or (height, width, 3).
    :param Y_masked: [N, …] images as the model saw them, NaN where missing.
    :param sd: [N, …] standard deviation of the reconstruction.
    :param num: show the first ``num``.
    :param cmap: colour map of images without colour.
    :param fig: an empty figure or subfigure to draw in; a new figure by default.
    :raises ValueError: if shapes do not fit.

    >>> fig = plot_reconstructions(np.eye(4), np.zeros((4, 4)), (2, 2))
    >>> len(fig.axes)
    8
    >>> plt.close(fig)
    """
    original = as_images(Y, image_shape, "Y")
    rows = {"original": original}
    for name, images in {"seen": Y_masked, "reconstruction": Y_hat, "sd": sd}.items():
        if images is not None:
            rows[name] = as_images(images, image_shape, name, len(original))
    if num < 1:
        raise ValueError(f"num: expected 1 or more, got {num}; ask for at least one image.")
    num = min(num, len(original))
    height, width = image_shape[:2]
    if fig is None:
        layout = ConstrainedLayoutEngine(w_pad=0.015, h_pad=0.015, wspace=0.0, hspace=0.0, rect=(0.01, 0.01, 0.98, 0.98))
        size = (0.62 * num + 1.1, 0.66 * len(rows) * height / width + 0.1)
        fig = plt.figure(figsize=size, layout=layout)
    axes = fig.subplots(len(rows), num, squeeze=False)
    shared = Normalize(np.nanmin(original[:num]), np.nanmax(original[:num]))
    for (name, images), row in zip(rows.items(), axes, strict=True):
        norm = Normalize(0.0, max(float(np.nanmax(images[:num])), np.finfo(float).tiny)) if name == "sd" else shared
        grey = colormaps["magma" if name == "sd" else cmap].with_extremes(bad="#C9D6E8")
        for image, ax in zip(images[:num], row, strict=True):
            ax.imshow(np.clip(norm(image), 0, 1) if image.ndim == 3 else image, cmap=grey, norm=norm)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", color=INK, fontsize="small", labelpad=6)
    return fig


def _choose(num: int, dims: Sequence[int] | None, relevance: Array | None) -> tuple[list[int], np.ndarray | None]:
    strength = None if relevance is None else check_shape(as_array(relevance, "relevance", 1), (num,), "relevance")
    pair = list(dims) if dims is not None else [0, 1] if strength is None else list(np.argsort(-strength)[:2])
    if len(pair) != 2 or len(set(pair)) != 2 or not all(0 <= dim < num for dim in pair):
        raise ValueError(f"dims: expected two different dimensions among 0 … {num - 1}, got {dims}.")
    return [int(dim) for dim in pair], strength


def _smooth(values: np.ndarray, steps: float | int) -> np.ndarray:
    """Exponential moving average with time constant ``steps``, divided by the weight it has gathered so far."""
    decay = np.exp(-1.0 / steps) if steps > 0 else 0.0
    average, weight, result = 0.0, 0.0, np.empty_like(values)
    for i, value in enumerate(values):
        if np.isfinite(value):  # a step that failed is a gap in the raw curve only
            average, weight = decay * average + (1 - decay) * value, decay * weight + (1 - decay)
        result[i] = average / weight if weight else np.nan
    return result


def _robust_limits(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """From the worst bound that a fit had after its first tenth to the best one there is."""
    late = [np.concatenate([raw, smoothed])[np.r_[len(raw) // 10 : len(raw)]] for raw, smoothed in curves]
    finite = np.concatenate(late)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return 0.0, 1.0
    low, high = np.quantile(finite, 0.02), np.quantile(finite, 0.998)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return float(low - margin), float(high + margin)
