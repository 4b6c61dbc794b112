"""Plots of latent spaces, relevances, bounds, ranks, reconstructions, series and fields."""

from pyro_lvgp.plots._drawing import PALETTE
from pyro_lvgp.plots.bounds import plot_bounds
from pyro_lvgp.plots.images import plot_reconstructions
from pyro_lvgp.plots.latents import plot_ard, plot_latents, plot_relevances
from pyro_lvgp.plots.ranks import plot_ranks
from pyro_lvgp.plots.series import plot_field, plot_series

__all__ = [
    "PALETTE",
    "plot_ard",
    "plot_bounds",
    "plot_field",
    "plot_latents",
    "plot_ranks",
    "plot_reconstructions",
    "plot_relevances",
    "plot_series",
]
