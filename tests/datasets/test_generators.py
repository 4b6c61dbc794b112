"""Generated data sets: sizes, seeds, and the distributions that their docstrings state."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.utils import check_random_state

from pyro_lvgp.datasets import bouncing_balls, s_curve, single_cells


def test_s_curve_sizes_seed_and_noise():
    state = check_random_state(None).get_state()[1].copy()  # of the global generator
    data, again, other = s_curve(200, 400, seed=3), s_curve(200, 400, seed=3), s_curve(200, 400, seed=4)
    np.testing.assert_array_equal(check_random_state(None).get_state()[1], state)
    assert (data.Y.shape, data.X.shape, data.F.shape, data.t.shape) == ((200, 400), (200, 2), (200, 400), (200,))
    np.testing.assert_array_equal(data.Y, again.Y)
    assert not np.array_equal(data.Y, other.Y)
    assert np.all(np.diff(data.t) > 0)
    np.testing.assert_allclose(data.X.std(0), 1)
    np.testing.assert_allclose(data.X[:, 0] / data.X[-1, 0], np.sin(data.t) / np.sin(data.t[-1]), rtol=1e-9)
    # 80,000 residuals: the standard error of their standard deviation is 0.5 / √160,000.
    assert abs((data.Y - data.F).std() - 0.5) < 5 * 0.5 / 400


def test_s_curve_has_the_stated_covariance():
    data = s_curve(20, 400_000)
    d = data.X[:, None] - data.X[None]
    K = 0.5 * np.exp(-0.5 * (d**2).sum(-1)) + 0.5 * np.exp(-2 * (np.sin(np.pi * d / 4.5) ** 2).sum(-1))
    centred = data.F - 5.0
    # The standard error of an entry is at most √(2 / 400,000); the mean's is 1 / √400,000.
    np.testing.assert_allclose(centred @ centred.T / 400_000, K, atol=5 * 0.00224)
    np.testing.assert_allclose(centred.mean(1), 0, atol=5 / 400_000**0.5)


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson", "negative-binomial", "binomial"])
def test_s_curve_counts_have_the_mean_and_variance_of_their_link(likelihood):
    data = s_curve(100, 1000, likelihood=likelihood, total_count=6)
    p, rate = expit(data.F), np.exp(data.F)
    mean, variance = {
        "bernoulli": (p, p * (1 - p)),
        "poisson": (rate, rate),
        "negative-binomial": (6 * rate, 6 * rate * (1 + rate)),
        "binomial": (6 * p, 6 * p * (1 - p)),
    }[likelihood]
    z = (data.Y - mean) / np.sqrt(variance)  # mean 0, variance 1: standard error of the mean 1 / √100,000
    assert data.Y.dtype == np.int64
    assert abs(z.mean()) < 5 / 1e5**0.5
    assert abs(z.var() - 1) < 0.1  # kurtosis of small counts: well above five standard errors


def test_balls_fall_with_one_acceleration_and_bounce_back_to_where_they_came_from():
    data = bouncing_balls(5, 400, 11, period=40.0, gravity=True, noise=0.0)
    assert 0.0 <= data.position.min() < 0.5
    assert 9.9 < data.position.max() <= 10.0
    bend = np.diff(data.position, 2)  # constant but where it bounces
    np.testing.assert_allclose(np.median(bend), -8 * 10 / 40**2, rtol=1e-6)
    assert np.isclose(bend, np.median(bend)).mean() > 0.9
    np.testing.assert_allclose(data.position[:, 40:], data.position[:, :-40], atol=1e-9)


def test_bouncing_balls_move_at_one_speed_and_turn_at_the_ends():
    data = bouncing_balls(30, 40, 7, period=10.0)
    assert (data.Y.shape, data.t.shape, data.position.shape) == ((30, 40, 7), (40,), (30, 40))
    np.testing.assert_array_equal(data.Y, bouncing_balls(30, 40, 7, period=10.0).Y)
    assert data.position.min() >= 0
    assert data.position.max() <= 6
    np.testing.assert_allclose(data.position[:, 10:], data.position[:, :-10], atol=1e-12)  # period
    speed = np.abs(np.diff(data.position))
    assert speed.max() <= 2 * 6 / 10 + 1e-12  # there and back in one period; less where it turns
    assert np.isclose(speed, 1.2).mean() > 0.6
    np.testing.assert_array_equal(data.F.argmax(-1), np.rint(data.position))
    assert abs((data.Y - data.F).std() - 0.1) < 5 * 0.1 / np.sqrt(2 * data.Y.size)


@pytest.mark.parametrize(
    ("generate", "arguments", "message"),
    [
        (s_curve, {"likelihood": "gamma"}, "expected a likelihood out of gaussian.*got 'gamma'"),
        (s_curve, {"num_data": 0}, "expected num_data of 1 or more, got 0"),
        (s_curve, {"noise": -1.0}, "at least 0, got -1"),
        (s_curve, {"noise": float("inf")}, "expected a finite noise .*, got inf"),
        (s_curve, {"mean": float("nan")}, "expected a finite mean, got nan"),
        (bouncing_balls, {"num_pixels": 0}, "expected num_pixels of 1 or more, got 0"),
        (bouncing_balls, {"period": 0.0}, "expected a positive period, got 0"),
        (bouncing_balls, {"width": float("nan")}, "expected a positive width, got nan"),
        (bouncing_balls, {"noise": -1.0}, "at least 0, got -1"),
    ],
)
def test_generators_check_their_arguments(generate, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(**arguments)


@pytest.mark.parametrize(
    ("generate", "name"), [(s_curve, "num_data"), (s_curve, "total_count"), (bouncing_balls, "num_steps")]
)
def test_sizes_are_whole_numbers(generate, name, unchecked):
    with pytest.raises(TypeError, match=rf"expected {name} to be an integer, got 2\.5; use int"):
        generate(**{name: 2.5})


@pytest.mark.parametrize("likelihood", ["gaussian", "binomial"])
def test_s_curve_may_be_a_point(likelihood):
    data = s_curve(1, 4, likelihood=likelihood)
    assert (data.Y.shape, data.X.shape, data.F.shape, data.t.shape) == ((1, 4), (1, 2), (1, 4), (1,))
    assert all(np.isfinite(data[name]).all() for name in data)


def test_single_cells_have_the_stated_counts_and_depths():
    data, again = single_cells(1000, 100, seed=3), single_cells(1000, 100, seed=3)
    np.testing.assert_array_equal(data.Y, again.Y)
    mean = data["mean"]
    np.testing.assert_allclose(mean.sum(1), data.depth)
    standardised = (data.Y - mean) / np.sqrt(mean + mean**2 / 2.0)
    # 100,000 residuals of unit variance.
    assert abs(standardised.mean()) < 5 / 100_000**0.5
    kurtosis = (standardised**4).mean()
    assert abs((standardised**2).mean() - 1.0) < 5 * (kurtosis / 100_000) ** 0.5
    log_depth = np.log(data.depth / 500.0)
    assert abs(log_depth.mean()) < 5 * 0.5 / 1000**0.5
    assert abs(log_depth.std() - 0.5) < 5 * 0.5 / 2000**0.5


def test_effects_of_batches_are_additive_on_the_logarithm():
    with_effects, without = single_cells(300, 20, seed=1), single_cells(300, 20, batch_effect=0.0, seed=1)
    logs = np.log(with_effects["mean"]) - np.log(without["mean"])
    for batch in range(3):  # but for the sum over genes, a number of each cell
        cells = logs[with_effects.batch == batch]
        np.testing.assert_allclose(cells - cells[:, :1], np.broadcast_to((cells - cells[:, :1])[0], cells.shape), atol=1e-9)


@pytest.mark.parametrize("wrong", [{"num_cells": 0}, {"batch_effect": -1.0}, {"dispersion": 0.0}])
def test_cells_out_of_range(wrong):
    with pytest.raises(ValueError, match="expected"):
        single_cells(**wrong)
