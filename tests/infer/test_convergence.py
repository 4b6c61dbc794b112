"""Rise of a bound at the end of a fit: its standard error, the rate of false alarms, epochs, and losses with heavy tails."""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.signal import lfilter
from scipy.stats import t as student

from pyro_lvgp.infer import FitResult, Gain
from pyro_lvgp.infer._convergence import estimate_gain

NUM_SERIES = 1500
FALSE_ALARMS = student.sf(2.0, df=5)  # 20% trimmed means of 10 differences have 5 degrees of freedom


def autoregressive(phi: float, num_steps: int, num_series: int = NUM_SERIES) -> np.ndarray:
    """Stationary AR(1) series with innovations of variance 1."""
    noise = np.random.default_rng(0).standard_normal((num_series, num_steps + 500))
    return lfilter([1.0], [1.0, -phi], noise)[:, 500:]


def error_of_windows(phi: float, window: int) -> float:
    """Exact standard deviation of the difference of means of two adjacent windows."""
    covariance = toeplitz(phi ** np.arange(2 * window) / (1.0 - phi**2))
    weights = np.repeat([-1.0 / window, 1.0 / window], window)
    return math.sqrt(weights @ covariance @ weights)


def gains(series: np.ndarray, **options: int) -> tuple[np.ndarray, np.ndarray]:
    found = [estimate_gain(bounds, **options) for bounds in series]
    return np.array([gain.value for gain in found if gain]), np.array([gain.standard_error for gain in found if gain])


@pytest.mark.parametrize(("phi", "num_steps", "slope"), [(0.0, 1000, 0.05), (0.5, 2000, 0.0), (0.9, 10_000, 0.05)])
def test_the_standard_error_is_that_of_correlated_losses_with_a_trend(phi: float, num_steps: int, slope: float):
    value, error = gains(autoregressive(phi, num_steps) + slope * np.arange(num_steps))
    exact, window = error_of_windows(phi, num_steps // 10), num_steps // 10
    assert len(value) == NUM_SERIES
    assert value.mean() == pytest.approx(slope * window, abs=4.0 * value.std() / math.sqrt(NUM_SERIES))
    # A trimmed mean of 10 normal numbers has a standard deviation 5% above that of the mean.
    assert value.std() / exact == pytest.approx(1.05, abs=0.06)
    assert np.sqrt(np.mean(error**2)) / value.std() == pytest.approx(1.0, abs=0.1)
    false_alarms = np.mean(value - slope * window > 2.0 * error)
    assert false_alarms == pytest.approx(FALSE_ALARMS, abs=0.03)


def test_a_rise_of_five_standard_errors_is_found():
    series = autoregressive(0.5, 2000, 500)
    value, error = gains(series + 5.0 * error_of_windows(0.5, 200) * np.arange(2000) / 200)
    assert np.mean(value > 2.0 * error) > 0.95


def test_losses_that_depend_on_the_mini_batch_are_averaged_over_epochs():
    rng, offsets, slope = np.random.default_rng(0), np.linspace(-50.0, 50.0, 7), 0.01
    bounds = np.concatenate([rng.permutation(offsets) for _ in range(144)])[:1003] + slope * np.arange(1003)
    gain = estimate_gain(bounds, steps_per_epoch=7)
    assert gain is not None
    assert gain.num_steps == 70
    # The order within epochs has no effect, and the last epoch, of two steps, is left out.
    assert gain.value == pytest.approx(slope * 70)
    assert gain.standard_error < 1e-9
    ignorant = estimate_gain(bounds)
    assert ignorant is not None
    assert not ignorant.is_significant


@pytest.mark.parametrize("first", [790, 880, 905, 995])
def test_a_few_diverging_steps_do_not_hide_a_rise(first: int):
    bounds = 0.1 * autoregressive(0.0, 1000, 1)[0] + 0.01 * np.arange(1000)
    undisturbed = estimate_gain(bounds)
    bounds[first : first + 12] -= 1e6 * 0.5 ** np.arange(len(bounds[first : first + 12]))
    gain = estimate_gain(bounds)
    assert undisturbed is not None
    assert gain is not None
    assert gain.value == pytest.approx(1.0, abs=4.0 * gain.standard_error)
    assert gain.standard_error < 2.0 * undisturbed.standard_error
    assert gain.is_significant
    windows = bounds[-200:].reshape(2, 10, 10).mean(-1)
    rises = windows[1] - windows[0]
    assert first < 800 or abs(rises.mean()) < 2.0 * rises.std() / 3.0  # with means the rise would not be seen


def test_losses_with_infinite_variance_raise_few_false_alarms_and_hide_no_rise():
    noise = student.rvs(1.5, size=(1000, 1000), random_state=0)
    value, error = gains(noise)
    assert np.mean(value > 2.0 * error) < FALSE_ALARMS + 0.03
    value, error = gains(noise + 0.05 * np.arange(1000))
    assert np.mean(value > 2.0 * error) > 0.95


@pytest.mark.parametrize(
    ("num_steps", "steps_per_epoch", "window"),
    [
        (499, 1, None),
        (500, 1, 50),
        (1000, 1, 100),
        (1099, 1, 100),
        (1000, 3, 90),
        (1000, 15, 150),
        (1000, 25, 250),
        (1000, 26, None),
        (11_999, 300, None),
        (12_000, 300, 3000),
    ],
)
def test_windows_are_a_tenth_of_the_steps_or_ten_epochs(num_steps: int, steps_per_epoch: int, window: int | None):
    gain = estimate_gain(np.arange(num_steps), steps_per_epoch=steps_per_epoch)
    assert gain == (None if window is None else Gain(float(window), 0.0, window))


@pytest.mark.parametrize(
    ("value", "error", "is_negligible"),
    [
        (0.5, 1.0, True),  # indistinguishable from zero
        (1.5, 1.0, False),  # also, but above the tolerance
        (-1.5, 1.0, True),
        (0.5, 0.1, True),  # distinguishable from zero and from the tolerance
        (0.9, 0.1, False),  # distinguishable from zero alone
        (0.9, 0.5, True),
        (3.0, 0.1, False),
        (-3.0, 0.1, False),  # the bound falls
        (0.0, 0.0, True),
        (1e-9, 0.0, True),
    ],
)
def test_negligible_gains(value: float, error: float, is_negligible: bool):
    assert Gain(value, error, 100).is_negligible(1.0) is is_negligible


def test_the_history_computes_the_gain_per_entry_from_its_losses():
    bounds = autoregressive(0.5, 1000, 1)[0] + 0.1 * np.arange(1000)
    history = FitResult(num_entries=5, losses=list(-5.0 * bounds), steps_per_epoch=4)
    assert history.gain == estimate_gain(bounds, steps_per_epoch=4)
    assert history.converged is False
    history.tolerance = 100.0
    assert history.converged is True
    history.losses = history.losses[:499]
    assert history.gain is None
    assert history.converged is None
