"""Plots of bounds."""

import numpy as np
import pytest
import torch

from pyro_lvgp import plots


def test_bounds_smooth_scale_and_clip():
    rng = np.random.default_rng(0)
    steps = np.arange(2000)
    bound = -100 - 50 * np.exp(-steps / 200) - 1e6 * np.exp(-steps / 5) + rng.normal(size=2000)
    ax = plots.plot_bounds({"a": bound, "b": torch.tensor(bound) - 20}, per=10)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    raw, smooth = ax.lines[:2]
    np.testing.assert_allclose(raw.get_ydata(), bound / 10)
    assert raw.get_alpha() < 0.3
    # An average over 40 steps of unit noise has a standard deviation of 1 / √80 = 0.11, and here a tenth of it.
    assert np.abs(smooth.get_ydata()[-500:] + 10).max() < 5 * 0.011
    low, high = ax.get_ylim()
    assert -25 < low < -12
    assert -10 < high < -9
    assert ax.get_xlabel() == "step"


def test_bounds_of_a_short_fit_are_in_sight():
    short, long = np.full(20, -5.0), np.linspace(-2.0, -1.0, 2000)
    low, high = plots.plot_bounds({"short": short, "long": long}).get_ylim()
    assert low < -5.0
    assert high > -1.0


def test_bounds_against_seconds_and_with_gaps():
    ax = plots.plot_bounds({"a": [-3.0, np.nan, -1.0]}, seconds={"a": [0.5, 1.0, 1.5]}, smooth=0)
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_xdata(), [0.5, 1.0, 1.5])
    np.testing.assert_allclose(line.get_ydata(), [-3.0, -3.0, -1.0])
    assert ax.get_xlabel() == "seconds"
    assert np.isfinite(plots.plot_bounds({"constant": [-2.0]}).get_ylim()).all()
    assert np.isfinite(plots.plot_bounds({"failed": [np.nan, np.nan]}).get_ylim()).all()


def test_smoothing_is_unbiased_from_the_first_step():
    ax = plots.plot_bounds({"a": np.full(100, -7.0)}, smooth=0.3)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), -7.0)


@pytest.mark.usefixtures("unchecked")
def test_bounds_go_by_name():
    with pytest.raises(TypeError, match="by name, got list"):
        plots.plot_bounds([1.0, 2.0])
