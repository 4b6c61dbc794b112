"""The benchmark of healing digits: hidden pixels and scores against their definitions, and all methods for a few steps."""

import math

import pytest
import torch

from benchmarks.core.report import aggregate
from benchmarks.tasks import healing_mnist
from pyro_lvgp.datasets import load_dataset


@pytest.fixture(scope="module")
def data():
    try:
        load_dataset("mnist", download=False)
    except FileNotFoundError:
        pytest.skip("PYRO_LVGP_DATA names no folder with MNIST")
    return {task: healing_mnist.make_data(hide, 16, 6, seed=0) for task, hide in healing_mnist.TASKS.items()}


def test_shares_of_hidden_pixels(data):
    white = data["at_random"].images == 1.0
    assert 0.05 < white.float().mean() < 0.3
    for task, of_white, of_black in (("at_random", 0.6, 0.6), ("not_at_random", 0.8, 0.4)):
        hidden = data[task].hidden.float()
        assert hidden[white].mean().item() == pytest.approx(of_white, abs=0.01)  # of 10,000 pixels or more
        assert hidden[~white].mean().item() == pytest.approx(of_black, abs=0.01)
    hidden = data["frames"].hidden
    assert torch.equal(hidden.all(-1), hidden.any(-1))
    assert (hidden.all(-1).sum(1) == healing_mnist.NUM_HIDDEN_FRAMES).all()
    assert not hidden[:, [0, -1]].any()


@pytest.mark.parametrize("task", ["at_random", "frames"])
def test_no_method_uses_hidden_pixels(data, task):
    others = data[task]._replace(images=torch.where(data[task].hidden, 1.0 - data[task].images, data[task].images))
    pairs = zip(*(healing_mnist.predictions(each, 2, seed=0) for each in (data[task], others)), strict=True)
    for (name, found, _), (_, of_others, _) in pairs:
        assert found.shape == (6, 10, 784)
        assert 0.0 <= found.min() <= found.max() <= 1.0
        torch.testing.assert_close(found, of_others, msg=name)


def test_interpolation_in_time_and_scores():
    images = torch.zeros(2, 10, 3)
    images[1, 4:, 0] = 1.0
    hidden = torch.zeros(2, 10, 3, dtype=torch.bool)
    hidden[1, [0, 3, 4, 5, 9], 0] = True
    hidden[1, :, 1] = True
    data = healing_mnist.Data(images, hidden, torch.tensor([0, 1]), 1)
    pixel = healing_mnist.interpolated(data, 0)[0]
    torch.testing.assert_close(pixel[:, 0], torch.tensor([0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(
        pixel[:, 1], torch.full((10,), 1.0 / 12.0)
    )  # the mean of ten black images, a white and a black one
    assert healing_mnist.last_seen(data, 0)[0, :, 0].tolist() == [0.0] * 6 + [1.0] * 4
    scores = healing_mnist.scores_of_pixels(data, torch.full((1, 10, 3), 0.25))
    assert scores["MSE"] == pytest.approx((3 * 0.75**2 + 12 * 0.25**2) / 15)
    assert scores["NLL"] == pytest.approx((3 * math.log(4.0) + 12 * math.log(4.0 / 3.0)) / 15)


def test_area_under_curve_of_classes_that_imputed_pixels_tell_apart():
    labels = torch.arange(21) % 2
    hidden = torch.ones(21, 10, 1, dtype=torch.bool)
    data = healing_mnist.Data(torch.zeros(21, 10, 1), hidden, labels, 1)
    certain = labels[1:, None, None].expand(20, 10, 1).float()
    assert healing_mnist.area_under_curve(data, 0.2 + 0.6 * certain) == 1.0
    assert healing_mnist.area_under_curve(data, 0.5 * torch.ones(20, 10, 1)) == 0.5


def test_every_method_is_measured(data, monkeypatch):
    two_classes = data["at_random"]._replace(labels=torch.arange(22) % 2)
    monkeypatch.setattr(healing_mnist, "make_data", lambda *_: two_classes)
    rows = aggregate(healing_mnist.run(quick=True, seeds=1, only="at_random"))
    assert list(dict.fromkeys(row.method for row in rows)) == [*healing_mnist.BASELINES, *healing_mnist.GP_VAES]
    assert {row.method for row in rows if row.metric == "NLL"} == set(healing_mnist.PROBABILISTIC)
    assert all(0.0 <= row.mean < 0.5 for row in rows if row.metric == "MSE")
    assert all(0.0 <= row.mean <= 1.0 for row in rows if row.metric == "AUROC")
