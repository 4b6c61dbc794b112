"""Plots of latents and of their relevance."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.collections import EllipseCollection, PathCollection
from matplotlib.offsetbox import AnnotationBbox
from matplotlib.ticker import AutoLocator, LogLocator

from pyro_lvgp import plots

plt = pytest.importorskip("matplotlib.pyplot")
GREY = matplotlib.colors.to_rgb("#B8B8B8")


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


def test_relevances_of_views_shared_dimensions_first():
    relevance = {"a": torch.tensor([0.0, 0.6, 0.3]), "b": [0.7, 0.0, 0.5], "c": np.array([0.0, 0.0, 0.4])}
    ax = plots.plot_relevances(relevance)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["2\nshared", "1\na", "0\nb"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b", "c"]
    table = np.array([[0.3, 0.6, 0.0], [0.5, 0.0, 0.7], [0.4, 0.0, 0.0]])
    np.testing.assert_allclose(ax.get_images()[0].get_array(), table, rtol=1e-6)
    assert [text.get_text() for text in ax.texts] == [f"{value:.2f}" for value in table.flat]
    ax = plots.plot_relevances(relevance, threshold=0.45)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1\na", "2\nb", "0\nb"]


@pytest.mark.parametrize(
    ("relevance", "message"),
    [({}, "one view or more"), ({"a": [0.1], "b": [0.1, 0.2]}, "shape"), ({"a": [-0.1]}, "≥ 0"), ({"a": [np.nan]}, "finite")],
)
def test_relevances_that_cannot_be_drawn(relevance, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_relevances(relevance)
