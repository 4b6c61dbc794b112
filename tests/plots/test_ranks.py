"""Plots of ranks of simulation-based calibration."""

import numpy as np
import pytest

from pyro_lvgp import plots
from pyro_lvgp.diagnostics import SiteRanks


def site(ecdf):
    points = np.array([0.25, 0.5, 0.75])
    return SiteRanks(np.array([0, 3]), (), points, np.array(ecdf), points - 0.1, points + 0.2, 0.25)


def test_curves_are_differences_from_uniform_with_bands():
    ax = plots.plot_ranks({"a": site([0.5, 0.5, 0.5]), "b": site([0.25, 0.5, 0.75])})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a, p = 0.25", "b, p = 0.25"]
    _, first, second = ax.lines
    np.testing.assert_allclose(first.get_ydata(), [0.0, 0.25, 0.0, -0.25, 0.0])
    np.testing.assert_allclose(second.get_ydata(), 0.0, atol=1e-15)
    ends = ax.collections[0].get_paths()[0].get_extents()
    np.testing.assert_allclose([ends.y0, ends.y1], [-0.1, 0.2])


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="expected the ranks of one site or more"):
        plots.plot_ranks({})
