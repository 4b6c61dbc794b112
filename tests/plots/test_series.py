"""Plots of series and of fields."""

import numpy as np
import pytest
import torch
from matplotlib.dates import AutoDateLocator

from pyro_lvgp import plots


def test_series_show_what_was_seen_the_band_and_what_was_hidden():
    t = np.linspace(0.0, 1.0, 20)
    truth = np.stack([np.sin(6 * t), np.cos(6 * t)], 1)
    seen = truth.copy()
    seen[12:, 1] = np.nan
    fig = plots.plot_series(t, truth + 0.1, np.full((20, 2), 0.3), seen=seen, truth=truth, names=["a", "b"], xlabel="time [s]")
    first, second = fig.axes
    assert [ax.get_ylabel() for ax in fig.axes] == ["a", "b"]
    assert second.get_xlabel() == "time [s]"
    (band,) = second.collections
    low, high = band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max()
    assert low == pytest.approx(truth[:, 1].min() - 0.5, abs=1e-6)
    assert high == pytest.approx(truth[:, 1].max() + 0.7, abs=1e-6)
    hidden, mean, dots = (line.get_ydata() for line in second.lines)
    assert np.isnan(hidden[:12]).all()
    np.testing.assert_array_equal(hidden[12:], truth[12:, 1])
    np.testing.assert_array_equal(mean, truth[:, 1] + 0.1)
    np.testing.assert_array_equal(dots, seen[:, 1])
    assert np.isnan(first.lines[0].get_ydata()).all()
    assert {text.get_text() for text in fig.legends[0].get_texts()} == {"hidden truth", "prediction ± 2 sd", "seen"}


def test_series_show_a_hidden_value_between_two_that_were_seen():
    truth = np.sin(np.arange(20.0))[:, None]
    seen = truth.copy()
    seen[[0, 5, 10, 11, 12]] = np.nan
    fig = plots.plot_series(np.arange(20.0), np.zeros((20, 1)), seen=seen, truth=truth)
    (ax,) = fig.axes
    for line in ax.lines[1:]:
        line.remove()
    ax.set_axis_off()
    fig.legends[0].remove()
    fig.canvas.draw()
    drawn = (np.asarray(fig.canvas.buffer_rgba())[..., :3] < 250).any(-1)
    height = len(drawn)
    for row in (0, 5, 11):
        x, y = ax.transData.transform([row, truth[row, 0]]).astype(int)
        assert drawn[height - y - 2 : height - y + 2, x - 1 : x + 2].any(), row
    assert not drawn[:, int(ax.transData.transform([7, 0])[0])].any()


def test_series_are_drawn_from_the_first_time_to_the_last():
    t, shuffled = np.linspace(0.0, 1.0, 20), np.random.default_rng(0).permutation(20)
    values = {
        "mean": t[:, None],
        "stddev": 0.1 + t[:, None],
        "seen": np.where(t < 0.5, t, np.nan)[:, None],
        "truth": t[:, None],
    }
    (ax,) = plots.plot_series(t, **values).axes
    (other,) = plots.plot_series(t[shuffled], **{name: value[shuffled] for name, value in values.items()}).axes
    for line, expected in zip(other.lines, ax.lines, strict=True):
        np.testing.assert_array_equal(line.get_xydata(), expected.get_xydata())
    band, expected = (axes.collections[0].get_paths()[0].vertices for axes in (other, ax))
    np.testing.assert_array_equal(band, expected)


@pytest.mark.parametrize(
    "make",
    [np.asarray, list, np.ndarray.tolist, lambda t: t.astype("datetime64[s]").tolist()],
    ids=["array", "list", "dates", "times of day"],
)
def test_series_over_dates_have_dates_on_the_axis(make):
    t = np.arange("2020-01-01", "2020-03-01", dtype="datetime64[D]")
    values = np.arange(120.0).reshape(60, 2)
    fig = plots.plot_series(make(t[::-1]), values[::-1], np.ones((60, 2)), seen=values[::-1], truth=values[::-1])
    fig.canvas.draw()
    for ax in fig.axes:
        assert isinstance(ax.xaxis.get_major_locator(), AutoDateLocator)
        np.testing.assert_array_equal(ax.lines[1].get_xdata(), t)
    assert "2020" in "".join(text.get_text() for text in fig.axes[-1].get_xticklabels())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": np.zeros(4)}, r"t: expected shape \[3\], got \[4\]"),
        ({"stddev": np.zeros((3, 1))}, r"stddev: expected shape \[3, 2\]"),
        ({"names": ["a"]}, "names: expected 2, one for each output, got 1"),
    ],
)
def test_series_refuse_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_series(**({"t": np.zeros(3), "mean": np.zeros((3, 2))} | change))


@pytest.mark.parametrize("gridded", [False, True])
def test_fields_share_colours_with_the_sites(gridded):
    places = np.stack(np.meshgrid(np.arange(4.0), np.arange(3.0)), -1).reshape(-1, 2)
    values, sites = places.sum(1), torch.tensor([[0.5, 0.5], [2.0, 1.0]])
    ax = plots.plot_field(
        places, values, grid=(3, 4) if gridded else None, sites=sites, site_values=[9.0, 1.0], label="zinc [mg/kg]"
    )
    drawn, measured = ax.collections
    np.testing.assert_array_equal(np.ravel(drawn.get_array()), values)
    np.testing.assert_array_equal(measured.get_array(), [9.0, 1.0])
    np.testing.assert_array_equal(measured.get_offsets(), sites)
    assert drawn.get_clim() == measured.get_clim() == (0.0, 9.0)
    assert ax.figure.axes[-1].get_ylabel() == "zinc [mg/kg]"


def test_fields_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"places: expected \[N, 2\], got \[3, 3\]"):
        plots.plot_field(np.zeros((3, 3)), np.zeros(3))
    with pytest.raises(ValueError, match="expected rows × columns to be 3, the number of places, got"):
        plots.plot_field(np.zeros((3, 2)), np.zeros(3), grid=(2, 2))
