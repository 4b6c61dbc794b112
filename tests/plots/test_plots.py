"""What is drawn, and what is refused."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.collections import EllipseCollection, PathCollection
from matplotlib.colors import to_rgb
from matplotlib.dates import AutoDateLocator
from matplotlib.offsetbox import AnnotationBbox
from matplotlib.ticker import AutoLocator, LogLocator
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from pyro_lvgp import plots

plt = pytest.importorskip("matplotlib.pyplot")
GREY = matplotlib.colors.to_rgb("#B8B8B8")


@pytest.fixture(autouse=True)
def _agg():
    before = dict(matplotlib.rcParams)
    plt.switch_backend("agg")
    yield
    plt.close("all")
    assert {k: v for k, v in matplotlib.rcParams.items() if k != "backend"} == {
        k: v for k, v in before.items() if k != "backend"
    }


@pytest.fixture(scope="module")
def digits():
    Y, labels = load_digits(return_X_y=True)
    pca = PCA(4, random_state=0).fit(Y)
    Z = pca.transform(Y)
    return Y, labels, Z / Z.std(0), pca.inverse_transform(Z)


def points(ax):
    """The scatter of data, not the empty ones that make the legend."""
    (scatter,) = [c for c in ax.collections if isinstance(c, PathCollection) and len(c.get_offsets())]
    return scatter


def thumbnails(ax):
    return [artist for artist in ax.artists if isinstance(artist, AnnotationBbox)]


def test_latents_points_colours_and_legend(digits):
    _, labels, Z, _ = digits
    ax = plots.plot_latents(Z, labels)
    np.testing.assert_array_equal(points(ax).get_offsets(), Z[:, :2])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list("0123456789")
    colors = points(ax).get_facecolors()[:, :3]
    for label in range(10):
        want = matplotlib.colors.to_rgb(plots.PALETTE[label])
        np.testing.assert_allclose(colors[labels == label], np.broadcast_to(want, ((labels == label).sum(), 3)))


@pytest.mark.parametrize("make", [np.asarray, lambda x: torch.tensor(x, dtype=torch.float32, requires_grad=True)])
def test_latents_take_the_most_relevant_dimensions(digits, make):
    Z = digits[2][:50]
    ax = plots.plot_latents(make(Z), relevance=make([0.1, 0.5, 0.2, 3.0]))
    np.testing.assert_allclose(points(ax).get_offsets(), Z[:, [3, 1]], rtol=1e-6)
    assert ax.get_xlabel() == "latent 3  (relevance 3)"
    assert ax.get_ylabel() == "latent 1  (relevance 0.5)"
    assert ax.get_legend() is None
    ax = plots.plot_latents(make(Z), dims=(2, 0))
    np.testing.assert_allclose(points(ax).get_offsets(), Z[:, [2, 0]], rtol=1e-6)


def test_latents_colour_bar_for_numbers_and_names_for_text(digits):
    Z = digits[2][:60]
    ax = plots.plot_latents(Z, np.linspace(0.0, 1.0, 60))
    assert len(ax.figure.axes) == 2
    assert ax.get_legend() is None
    ax = plots.plot_latents(Z, ["cat", "dog"] * 30)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["cat", "dog"]


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, list])
def test_latents_without_a_label_are_grey_and_leave_the_range_alone(digits, make):
    Z, numbers = digits[2][:40], np.arange(40.0)
    numbers[:3] = np.nan
    ax = plots.plot_latents(Z, make(numbers))
    colors = points(ax).get_facecolors()[:, :3]
    np.testing.assert_allclose(colors[:3], np.broadcast_to(GREY, (3, 3)))
    np.testing.assert_allclose(colors[3:], matplotlib.colormaps["viridis"](np.arange(37) / 36)[:, :3])
    assert ax.figure.axes[1].get_ylim() == (3.0, 39.0)


@pytest.mark.parametrize(
    ("labels", "texts"),
    [
        ([1234567, 1234568], ["1234567", "1234568"]),
        ([0.1234561, 0.1234562, 0.5], ["0.1234561", "0.1234562", "0.5"]),
        ([1 / 3, 2.0], ["0.333333", "2"]),
        ([0.1 + 0.2, 0.3], ["0.3", "0.30000000000000004"]),
        (torch.tensor([0.1, 1e10]), ["0.1", "1e+10"]),
    ],
)
def test_other_labels_have_other_texts(labels, texts):
    ax = plots.plot_latents(np.zeros((len(labels), 2)), labels)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == texts


class Unknown:
    """Neither like nor unlike itself, as pandas' NA."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    __hash__ = None


@pytest.mark.parametrize("missing", [None, np.nan, np.datetime64("NaT"), Unknown()])
@pytest.mark.parametrize("names", [["a", "b"], [0, 1], [0.5, 1.5], [True, False]])
@pytest.mark.parametrize("make", [list, lambda labels: np.array(labels, dtype=object)])
def test_a_missing_class_is_not_in_the_legend(digits, names, missing, make):
    complete = plots.plot_latents(digits[2][:40], make(names * 20))
    ax = plots.plot_latents(digits[2][:41], make([*names * 20, missing]))
    assert [[text.get_text() for text in which.get_legend().get_texts()] for which in (ax, complete)] == [
        [str(name) for name in sorted(names)]
    ] * 2
    colors = points(ax).get_facecolors()[:, :3]
    np.testing.assert_allclose(colors[:40], points(complete).get_facecolors()[:, :3])
    np.testing.assert_allclose(colors[40], GREY)


def test_latents_may_all_be_without_a_label(digits):
    ax = plots.plot_latents(digits[2][:4], [None] * 4)
    np.testing.assert_allclose(points(ax).get_facecolors()[:, :3], np.broadcast_to(GREY, (4, 3)))
    assert not ax.get_legend().get_texts()


def test_given_axes_keep_the_ticks_that_were_chosen():
    ax = plt.figure().subplots()
    ax.set_yscale("log")
    ax.set_xticks([1, 2])
    plots.plot_bounds({"a": [1.0, 2.0, 3.0]}, ax=ax)
    assert isinstance(ax.yaxis.get_major_locator(), LogLocator)
    assert list(ax.get_xticks()) == [1, 2]
    ax = plots.plot_bounds({"a": [1.0, 2.0, 3.0]}, ax=plt.figure().subplots())
    assert not isinstance(ax.yaxis.get_major_locator(), AutoLocator)


def test_latents_ellipses_have_one_standard_deviation(digits):
    Z = digits[2][:20]
    sd = np.linspace(0.1, 0.3, 80).reshape(20, 4)
    ax = plots.plot_latents(Z, scale=sd, dims=(0, 2))
    (ellipses,) = [c for c in ax.collections if isinstance(c, EllipseCollection)]
    np.testing.assert_allclose(ellipses.get_widths(), 2 * sd[:, 0])
    np.testing.assert_allclose(ellipses.get_heights(), 2 * sd[:, 2])


@pytest.mark.parametrize("num_images", [0, 1, 12, 500])
def test_thumbnails_lie_on_their_points_and_do_not_overlap(digits, num_images):
    Y, labels, Z, _ = digits
    ax = plots.plot_latents(Z, labels, images=Y, image_shape=(8, 8), num_images=num_images)
    boxes = thumbnails(ax)
    assert len(boxes) == num_images if num_images <= 12 else 12 < len(boxes) < 500
    ax.figure.canvas.draw()
    extents = [box.get_window_extent() for box in boxes]
    for i, (box, extent) in enumerate(zip(boxes, extents, strict=True)):
        index = np.flatnonzero((Z[:, :2] == box.xy).all(1))
        assert len(index) == 1
        shown = np.asarray(box.offsetbox.get_data())
        np.testing.assert_allclose(shown, Y[index[0]].reshape(8, 8) / 16)
        assert not any(extent.overlaps(other) for other in extents[:i])


@pytest.mark.parametrize("num_known", [0, 1, 50])
def test_points_that_lie_nowhere_have_no_thumbnail(digits, num_known):
    Y, _, Z, _ = digits
    Z = np.where(np.arange(len(Z))[:, None] < num_known, Z, [np.nan, 0.0, 0.0, 0.0])
    boxes = thumbnails(plots.plot_latents(Z, images=Y, image_shape=(8, 8)))
    assert len(boxes) == num_known if num_known < 2 else 1 < len(boxes) <= num_known
    assert np.isfinite([box.xy for box in boxes]).all()


def test_latents_draw_in_given_axes_and_subfigures(digits):
    Y, labels, Z, _ = digits
    figure = plt.figure(layout="constrained")
    left, right = figure.subfigures(1, 2)
    for part in (left, right):
        ax = part.subplots()
        assert plots.plot_latents(Z, labels, images=Y, image_shape=(8, 8), num_images=5, ax=ax) is ax
        assert len(thumbnails(ax)) == 5


def test_ard_bars_are_sorted():
    relevance = torch.tensor([0.2, 3.0, 1.0, 0.0], requires_grad=True)
    ax = plots.plot_ard(relevance)
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], [3.0, 1.0, 0.2, 0.0], rtol=1e-6)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "2", "0", "3"]


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


def test_reconstructions_in_colour():
    Y = np.random.default_rng(0).random((3, 4, 6, 3))
    figure = plots.plot_reconstructions(Y, Y * 2, (4, 6, 3))
    assert figure.axes[0].images[0].get_array().shape == (4, 6, 3)
    assert figure.axes[5].images[0].get_array().max() <= 1
    Y[0, 1, 2, 0] = np.nan  # a pixel without its red
    shown = plots.plot_reconstructions(Y, Y, (4, 6, 3)).axes[0].images[0].get_array()
    np.testing.assert_allclose(shown[1, 2], to_rgb("#C9D6E8"))
    assert not np.isnan(shown).any()


def refuse(match, function, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        function(*args, **kwargs)
    assert not plt.get_fignums()  # refused before a figure was made


def test_errors():
    Z, Y = np.zeros((5, 3)), np.zeros((5, 16))
    refuse(r"mean: expected an array \[N, Q\]", plots.plot_latents, np.zeros(5))
    refuse("Q ≥ 2", plots.plot_latents, np.zeros((5, 1)))
    refuse(r"labels: expected shape \[5\], got \[4\]", plots.plot_latents, Z, [0, 1, 2, 3])
    refuse(r"scale: expected shape \[5, 3\]", plots.plot_latents, Z, scale=np.zeros((5, 2)))
    refuse("dims: expected two different", plots.plot_latents, Z, dims=(1, 1))
    refuse("dims: expected two different", plots.plot_latents, Z, dims=(0, 3))
    refuse(r"relevance: expected shape \[3\]", plots.plot_latents, Z, relevance=[1.0])
    refuse("image_shape: expected", plots.plot_latents, Z, images=Y)
    refuse(r"images: expected \[5, 64\]", plots.plot_latents, Z, images=Y, image_shape=(8, 8))
    refuse("num_images", plots.plot_latents, Z, images=Y, image_shape=(4, 4), num_images=-1)
    refuse("finite numbers", plots.plot_ard, [-1.0, 2.0])
    refuse("finite numbers", plots.plot_ard, [np.nan, 2.0])
    refuse("one history or more", plots.plot_bounds, {})
    refuse("per > 0", plots.plot_bounds, {"a": [1.0]}, per=0)
    refuse("none for 'a'", plots.plot_bounds, {"a": [1.0]}, seconds={})
    refuse(r"seconds\['a'\]: expected shape \[1\]", plots.plot_bounds, {"a": [1.0]}, seconds={"a": [1.0, 2.0]})
    refuse(r"histories\['a'\]", plots.plot_bounds, {"a": []})
    refuse(r"reconstruction: expected \[5, 16\]", plots.plot_reconstructions, Y, Y[:4], (4, 4))
    refuse("image_shape", plots.plot_reconstructions, Y, Y, (16,))
    refuse("num: expected 1 or more", plots.plot_reconstructions, Y, Y, (4, 4), num=0)


# ---- series and fields


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


@pytest.mark.usefixtures("unchecked")
def test_bounds_go_by_name():
    with pytest.raises(TypeError, match="by name, got list"):
        plots.plot_bounds([1.0, 2.0])
