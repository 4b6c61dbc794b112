"""Timing over sizes, all of the large sets, and the pictures: scores on known answers, and quick runs."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("gpytorch")

from benchmarks.core.report import aggregate
from benchmarks.tasks import srflvm_large, srflvm_pictures, srflvm_scaling
from pyro_lvgp.datasets import s_curve

with_data = pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data")


def test_slope_is_the_exponent():
    assert srflvm_scaling.slope({10: 0.03, 20: 0.12, 40: 0.48}) == pytest.approx(2.0)


@pytest.mark.parametrize("part", ["rows", "columns"])
def test_both_are_timed_at_every_size(part):
    rows = aggregate(srflvm_scaling.run(quick=True, seeds=1, only=part))
    times = [row for row in rows if row.metric.endswith("[s]")]
    assert len(times) == 4
    assert len(rows) == 6
    assert all(row.mean > 0.0 for row in times)
    assert {row.method for row in rows} == set(srflvm_scaling.METHODS)


def test_steps_and_sweeps_move():
    torch.manual_seed(0)
    step = srflvm_scaling.our_step(30, 4, seed=0)
    assert step() != step()
    sweep = srflvm_scaling.gibbs_sweep(30, 4, seed=0)
    assert not torch.equal(sweep().X, sweep().X)


@with_data
@pytest.mark.parametrize(("name", "shape"), [("mnist", (60_000, 784)), ("cifar", (50_000, 1024))])
def test_large_sets_are_whole_and_standardised(name, shape):
    Y, y = srflvm_large.TASKS[name]()
    assert Y.shape == shape
    assert len(y) == len(Y)
    assert len(np.unique(y)) == 10
    np.testing.assert_allclose(Y[:, ::50].mean(0), 0.0, atol=1e-3)
    assert Y[::100].std() == pytest.approx(1.0, abs=0.05)


def test_large_latents_tell_what_the_rows_are(monkeypatch):
    monkeypatch.setattr(srflvm_large, "BATCH_SIZE", 50)
    rng, y = np.random.default_rng(0), np.repeat(np.arange(3), 60)
    Y = srflvm_large.standardised((10.0 * np.eye(3)[y] @ rng.standard_normal((3, 8)) + rng.standard_normal((180, 8))).round())
    start = srflvm_large.latents(Y, 2, 50, seed=0, num_steps=1)
    found = srflvm_large.measure("toy", "ours", lambda: srflvm_large.latents(Y, 2, 50, seed=0, num_steps=10), y, {}, seed=0)
    assert start.shape == (180, 2)
    assert found.value > 0.9
    assert found.seconds > 0.0


def test_published_figures_are_of_the_sets_measured():
    names = {f"{name}, Q = {Q}" for name in srflvm_large.TASKS for Q in srflvm_large.LATENT_DIMS}
    assert {row.dataset for row in srflvm_large.PUBLISHED} == names


def test_the_true_kernel_is_that_of_the_data():
    data = s_curve(40, 20_000, noise=0.0, mean=0.0)
    K = srflvm_pictures.true_kernel(torch.as_tensor(data["X"])).numpy()
    np.testing.assert_allclose(np.cov(data["F"], bias=True), K, atol=0.05)


@with_data
def test_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(srflvm_pictures.imputation, "NUM_DRAWS", 2)
    srflvm_pictures.main(["--quick", "--out", str(tmp_path)])
    names = {"srflvm_kernel.png", "srflvm_scaling.png", "srflvm_imputed_cifar.png", "srflvm_imputed_frey.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
