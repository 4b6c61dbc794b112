"""Plot of ranks of simulation-based calibration."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.plots._drawing import FAINT, PALETTE, clean_axes

if TYPE_CHECKING:
    from pyro_lvgp.diagnostics import SiteRanks

__all__ = ["plot_ranks"]


@names_types
def plot_ranks(ranks: "Mapping[str, SiteRanks]", *, ax: Axes | None = None) -> Axes:
    r"""Plot the deviation of the distribution of ranks from uniformity, :math:`\hat F(z) - z`, with simultaneous 95 % bands.

    A curve that leaves its band deviates.  It is above zero on the left and below on the right if the posterior is too narrow,
    the reverse if it is too wide, above zero if posterior draws are too high, and below zero if they are too low.

    :param ranks: ranks by name: a :class:`~pyro_lvgp.diagnostics.RankCalibration`, or sites of several of them.
    :param ax: axes to draw in; a new figure by default.
    :raises ValueError: if there are no ranks.

    >>> from matplotlib import pyplot as plt
    >>> from pyro_lvgp.diagnostics import SiteRanks
    >>> points = np.array([0.25, 0.5, 0.75])
    >>> site = SiteRanks(np.array([0, 3]), (), points, np.array([0.5, 0.5, 0.5]), points - 0.6, points + 0.6, 0.8)
    >>> ax = plot_ranks({"loc": site})
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['loc, p = 0.8']
    >>> plt.close(ax.figure)

    Source: Säilynoja, Bürkner and Vehtari (2022), "Graphical test for discrete uniformity and its applications in
    goodness-of-fit evaluation and multiple sample comparison".
    """
    if not isinstance(ranks, Mapping):
        raise TypeError(f"expected ranks by the name of each site, got {type(ranks).__name__}; pass a RankCalibration")
    if not ranks:
        raise ValueError("expected the ranks of one site or more, got none; pass simulation_based_calibration(...)")
    ax = clean_axes(ax, (5.0, 3.4))
    ax.axhline(0.0, color=FAINT, linewidth=0.8, zorder=1)
    for i, (name, site) in enumerate(ranks.items()):
        color = PALETTE[i % len(PALETTE)]
        points, ecdf, lower, upper = (
            np.pad(values, 1, constant_values=(0.0, 1.0)) for values in (site.points, site.ecdf, site.lower, site.upper)
        )
        ax.fill_between(points, lower - points, upper - points, color=color, alpha=0.14, linewidth=0, zorder=2)
        ax.plot(points, ecdf - points, color=color, linewidth=1.6, zorder=3, label=f"{name}, p = {site.p_value:.2g}")
    ax.margins(x=0.01)
    ax.set_xlabel("rank of the truth among posterior draws / number of ranks")
    ax.set_ylabel("distribution function − uniform")
    ax.legend(frameon=False, fontsize="small", loc="best")
    return ax
