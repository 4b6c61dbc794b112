"""The benchmark of rotated digits: rotations and hidden images against their definitions, and all methods for a few steps."""

import math

import pytest
import torch

from benchmarks.core.report import aggregate
from benchmarks.tasks import rotated_mnist
from pyro_lvgp.datasets import load_dataset


def test_quarter_turns_are_those_of_the_pixels():
    images = torch.rand(2, 28 * 28)
    turned = rotated_mnist.rotate(images, torch.tensor([0.0, math.pi / 2.0, math.pi])).unflatten(-1, (28, 28))
    for k in range(3):
        torch.testing.assert_close(turned[:, k], images.reshape(2, 28, 28).rot90(k, (1, 2)), rtol=0.0, atol=1e-4)


@pytest.fixture
def data():
    try:
        load_dataset("mnist", download=False)
    except FileNotFoundError:
        pytest.skip("PYRO_LVGP_DATA names no folder with MNIST")
    return rotated_mnist.make_data(12, seed=0)


def test_one_angle_of_three_quarters_of_the_styles_is_unseen(data):
    assert data.hidden.sum(1).tolist() == [1] * 9 + [0] * 3
    assert torch.equal(data.seen.isnan().all(-1), data.hidden)
    assert not data.mean_of_styles.isnan().any()
    assert 0.0 <= data.images.min() < data.images.max() <= 1.0


def test_no_method_uses_unseen_images(data):
    others = data._replace(images=torch.where(data.hidden[..., None], torch.rand(784), data.images))
    for name, predict in rotated_mnist.METHODS.items():
        found = []
        for each in (data, others):
            torch.manual_seed(0)
            found.append(predict(each, 2)[data.hidden])
        assert found[0].shape == (9, 784)
        torch.testing.assert_close(found[0], found[1], msg=name)


def test_every_method_is_measured(data, monkeypatch):
    monkeypatch.setattr(rotated_mnist, "make_data", lambda *_: data)
    rows = aggregate(rotated_mnist.run(quick=True, seeds=1))
    assert [row.method for row in rows] == list(rotated_mnist.METHODS)
    assert all(0.0 < row.mean < 0.5 for row in rows)
