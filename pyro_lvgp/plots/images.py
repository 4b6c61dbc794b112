"""Plot of images and their reconstructions."""

from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.plots._drawing import INK, Array, as_images

__all__ = ["plot_reconstructions"]

_MISSING = "#C9D6E8"


@names_types
def plot_reconstructions(
    Y: Array,
    Y_hat: Array | Mapping[str, Array],
    image_shape: tuple[int, ...],
    *,
    Y_masked: Array | None = None,
    sd: Array | None = None,
    num: int = 10,
    cmap: str = "gray",
    fig: Figure | None = None,
) -> Figure:
    """Plot rows of images: originals, inputs of the model, reconstructions, and their standard deviations.

    All images share the colour scale of ``Y``; standard deviations have one of their own, from zero.  Missing pixels (NaN) are
    blue.

    :param Y: [N, …] images, flat or not.
    :param Y_hat: [N, …] reconstructions, or those of several methods by name.
    :param image_shape: (height, width) or (height, width, 3).
    :param Y_masked: [N, …] inputs of the model, NaN where missing.
    :param sd: [N, …] standard deviation of the reconstruction.
    :param num: number of images, the first ones.
    :param cmap: colour map of images without colour.
    :param fig: an empty figure or subfigure to draw in; a new figure by default.
    :raises ValueError: if shapes do not fit, or a method has the name of another row.

    >>> fig = plot_reconstructions(np.eye(4), np.zeros((4, 4)), (2, 2))
    >>> len(fig.axes)
    8
    >>> plt.close(fig)
    """
    original = as_images(Y, image_shape, "Y")
    rows = {"original": original}
    reconstructions = Y_hat if isinstance(Y_hat, Mapping) else {"reconstruction": Y_hat}
    if taken := {"original", "seen", "sd"} & reconstructions.keys():
        raise ValueError(f"expected names of methods in Y_hat, got {sorted(taken)}, which name other rows; rename them")
    for name, images in {"seen": Y_masked, **reconstructions, "sd": sd}.items():
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
        if cmap not in colormaps:
            raise ValueError(f"expected the name of a colour map of matplotlib as cmap, got {cmap!r}; such as 'gray'")
        grey = colormaps["magma" if name == "sd" else cmap].with_extremes(bad=_MISSING)
        for image, ax in zip(images[:num], row, strict=True):
            if image.ndim == 3:
                missing = np.isnan(image).any(-1, keepdims=True)
                image = np.where(missing, to_rgb(_MISSING), np.clip(norm(image), 0.0, 1.0))
            ax.imshow(image, cmap=grey, norm=norm)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", color=INK, fontsize="small", labelpad=6)
    return fig
