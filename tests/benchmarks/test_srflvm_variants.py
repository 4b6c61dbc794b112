"""Variants of two-dimensional latents: a back-constraint by its formula, and all of them for a few steps."""

from dataclasses import replace

import numpy as np
import pyro
import pytest
import torch

pytest.importorskip("gpytorch")

from benchmarks.tasks import srflvm_variants as variants
from benchmarks.tasks.srflvm import ACCURACY, Task
from tests.helpers.counts_of_kinds import counts_of_kinds


@pytest.fixture
def task():
    return Task(*counts_of_kinds(9.0), counts=True)


@pytest.mark.usefixtures("float64")
def test_a_back_constraint_is_a_kernel_machine():
    Y, X = torch.randn(40, 20), torch.randn(40, 2)
    constraint = variants.BackConstraint(Y, X, scale=0.2)
    mean, scale = constraint(Y)
    torch.testing.assert_close(mean, X, rtol=0.0, atol=0.05)
    torch.testing.assert_close(scale, torch.full((40, 2), 0.2))
    reach = torch.cdist(Y, Y).sort(1).values[:, 10]
    first = sum((-0.5 * (Y[0] - Y[j]).square().sum() / (reach[0] * reach[j])).exp() * constraint.weights[j] for j in range(40))
    torch.testing.assert_close(mean[0], first)


@pytest.mark.usefixtures("float64")
def test_rows_that_are_alike_share_their_latents_under_a_back_constraint():
    Y = torch.randn(20, 3).repeat(2, 1)
    mean, _ = variants.BackConstraint(Y, torch.randn(40, 2))(Y)
    torch.testing.assert_close(mean[:20], mean[20:])


def test_all_variants_are_measured(task):
    for name, variant in variants.variants(task).items():
        few = replace(variant, num_steps=4)
        found = {one.metric: one for one in variants.measure("toy", task, name, few, seed=0)}
        assert found.keys() == {ACCURACY, variants.BOUND}
        assert found[ACCURACY].value > 0.65
        assert np.isfinite(found[variants.BOUND].value)
        assert found[ACCURACY].settings == {"steps": 4}


def test_chains_start_where_shared_weights_end(task):
    plain, _ = variants.shared(task, 0, 3)
    pyro.clear_param_store()
    annealed, _ = variants.annealed(task, 0, 6)
    assert np.abs(plain - annealed).max() < 1.0
    assert np.corrcoef(plain.ravel(), annealed.ravel())[0, 1] > 0.9


def test_logarithms_are_of_counts_alone(task):
    names = set(variants.variants(task)) - set(variants.variants(replace(task, counts=False)))
    assert names == {"logarithms", "logarithms, 400 frequencies, half the lengthscale"}
    Y = variants.in_logarithms(task).standardised
    np.testing.assert_allclose([Y.mean(), Y.std()], [0.0, 1.0], atol=1e-12)
    expected = np.log1p(task.Y) - np.log1p(task.Y).mean(0)
    np.testing.assert_allclose(Y * expected.std(), expected, atol=1e-12)


def test_the_last_row_has_the_fit_with_the_highest_bound(task, monkeypatch):
    names = ["as in srflvm", "200 frequencies", "logarithms"]
    few = {name: variant for name, variant in variants.variants(task).items() if name in names}
    monkeypatch.setattr(variants, "TASKS", {"toy": lambda: task})
    monkeypatch.setattr(variants, "variants", lambda _: few)
    found = {(one.method, one.metric): one for one in variants.run(quick=True, seeds=1)}
    best = min(names[:2], key=lambda name: found[name, variants.BOUND].value)
    for metric in (ACCURACY, variants.BOUND):
        assert found[variants.CHOSEN, metric].value == found[best, metric].value
    seconds = [found[name, ACCURACY].seconds for name in names[:2]]
    assert found[variants.CHOSEN, ACCURACY].seconds == pytest.approx(sum(seconds))
