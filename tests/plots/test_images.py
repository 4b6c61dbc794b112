"""Plots of reconstructed images."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from pyro_lvgp import plots


def test_reconstruction_rows(digits):
    Y, _, _, Y_hat = digits
    masked = Y.copy()
    masked[:, ::3] = np.nan
    figure = plots.plot_reconstructions(torch.tensor(Y), Y_hat, (8, 8), Y_masked=masked, sd=np.abs(Y - Y_hat), num=6)
    figure.canvas.draw()
    axes = np.array(figure.axes).reshape(4, 6)
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["original", "seen", "reconstruction", "sd"]
    for row, images in zip(axes, (Y, masked, Y_hat, np.abs(Y - Y_hat)), strict=True):
        for ax, image in zip(row, images, strict=False):
            (shown,) = ax.images
            np.testing.assert_allclose(np.ma.filled(shown.get_array(), np.nan), image.reshape(8, 8))
    limits = {ax.images[0].get_clim() for ax in axes[:3].flat}
    assert limits == {(0.0, Y[:6].max())}
    assert len(plots.plot_reconstructions(Y[:3], Y_hat[:3], (8, 8)).axes) == 6


def test_reconstructions_by_several_methods(digits):
    Y, _, _, Y_hat = digits
    axes = np.array(plots.plot_reconstructions(Y, {"a": Y_hat, "b": Y + 1.0}, (8, 8), num=2).axes).reshape(3, 2)
    assert [ax.get_ylabel() for ax in axes[:, 0]] == ["original", "a", "b"]
    np.testing.assert_allclose(axes[2, 1].images[0].get_array(), Y[1].reshape(8, 8) + 1.0)
    assert {ax.images[0].get_clim() for ax in axes.flat} == {(0.0, Y[:2].max())}
    with pytest.raises(ValueError, match=r"got \['sd', 'seen'\], which name other rows"):
        plots.plot_reconstructions(Y, {"seen": Y, "sd": Y}, (8, 8))


def test_reconstructions_in_colour():
    Y = np.random.default_rng(0).random((3, 4, 6, 3))
    figure = plots.plot_reconstructions(Y, Y * 2, (4, 6, 3))
    assert figure.axes[0].images[0].get_array().shape == (4, 6, 3)
    assert figure.axes[5].images[0].get_array().max() <= 1
    Y[0, 1, 2, 0] = np.nan  # a pixel without its red
    shown = plots.plot_reconstructions(Y, Y, (4, 6, 3)).axes[0].images[0].get_array()
    np.testing.assert_allclose(shown[1, 2], to_rgb("#C9D6E8"))
    assert not np.isnan(shown).any()
