"""The benchmark of maps from a layout: scores of known maps, splits, and all methods but UMAP for a few steps."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("gpytorch")

from benchmarks.tasks import srflvm_layout as layouts
from benchmarks.tasks.srflvm import Task
from tests.helpers.counts_of_kinds import counts_of_kinds


@pytest.fixture
def task():
    return Task(*counts_of_kinds(9.0), counts=True)


def test_a_split_is_of_all_rows_and_scaled_by_training_rows(task):
    given = layouts.split(task, 1)
    assert len(given.train.Y) == 72
    both = np.concatenate([given.train.Y, given.new.Y])
    np.testing.assert_array_equal(np.sort(both, 0), np.sort(task.Y, 0))
    train, new = layouts.standardised(given)
    np.testing.assert_allclose([train.mean(0), train.std(0)], [np.zeros(6), np.ones(6)], atol=1e-12)
    np.testing.assert_allclose(new * given.train.Y.std(0) + given.train.Y.mean(0), given.new.Y)
    np.testing.assert_allclose(train, given.train.standardised)


def test_scores_are_of_new_rows_among_training_rows_and_of_their_surer_half(task):
    given = layouts.split(task, 0)
    train, new = given.train.target[:, None] * np.ones(2), given.new.target[:, None] * np.ones(2)
    wrong = np.arange(18) % 2 == 1
    found = layouts.Map(train, np.where(wrong[:, None], new + 1.2, new), wrong + 0.1, {"other": 7.0})
    values = layouts.scores(found, given)
    expected_right = (np.where(wrong, np.minimum(given.new.target + 1, 2), given.new.target) == given.new.target)[wrong].mean()
    assert values.pop(layouts.UNSURE) == pytest.approx(expected_right)
    assert values.pop(layouts.NEW) == pytest.approx(0.5 + 0.5 * expected_right)
    assert values == {layouts.ACCURACY: 1.0, layouts.SURE: 1.0, "other": 7.0}


def test_methods_but_umap_are_measured(task):
    few = {name: method for name, method in layouts.METHODS.items() if name != "UMAP"}
    task = replace(task, counts=False)  # the posterior of Gaussian weights is exact from the first step
    found = {(one.method, one.metric): one.value for one in layouts.measure(few, "toy", task, seed=0, num_steps=3)}
    assert {method for method, _ in found} == set(few)
    assert min(found[method, layouts.ACCURACY] for method in few) > 0.7
    *_, learned, frozen = few
    for method in (learned, frozen):
        difference = found[method, layouts.ACCURACY] - found[layouts.TSNE, layouts.ACCURACY]
        assert found[method, layouts.DIFFERENCE] == pytest.approx(difference)
        assert found[method, layouts.NEW] > 0.6
    assert found[frozen, layouts.ACCURACY] == found[frozen, layouts.START] == found[learned, layouts.START]
    assert (layouts.TSNE, layouts.NEW) not in found


@pytest.mark.parametrize(("most", "weights"), [(20, "collapsed"), (5, "shared")])
def test_many_columns_of_counts_share_a_factor(task, monkeypatch, most, weights):
    made, make = [], layouts.RandomFeatureGuide

    def recorded(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(layouts, "MOST_COLLAPSED", most)
    monkeypatch.setattr(layouts, "RandomFeatureGuide", recorded)
    found = layouts.ours(layouts.split(task, 0), 1)
    assert made[0].weights == weights
    assert found.new.shape == (18, 2)
