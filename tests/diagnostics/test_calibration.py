"""Split-conformal intervals: coverage over simulated splits, ties, and errors."""

import math

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp import BayesianGPLVM, MeanFieldELBO, MeanFieldGuide, fit
from pyro_lvgp.diagnostics import calibrate
from pyro_lvgp.models import Prediction

nan = torch.nan
NUM_SPLITS = 500

pytestmark = pytest.mark.usefixtures("float64")


def coverage(y, prediction, **options):
    """Coverage of the last row after calibration on all others; each column is a split with data of its own."""
    is_last = torch.arange(len(y))[:, None] == len(y) - 1
    lower, upper = calibrate(prediction, y.masked_fill(is_last, nan), per_column=True, **options).interval(prediction)
    return ((lower <= y) & (y <= upper))[-1].double().mean()


def standard_error(probability):
    return math.sqrt(probability * (1.0 - probability) / NUM_SPLITS)


@pytest.mark.parametrize(
    ("score", "scale", "num_calibration", "level"),
    [("stddev", 0.05, 9, 0.9), ("stddev", 20.0, 25, 0.8), ("quantile", 0.05, 25, 0.8), ("quantile", 20.0, 9, 0.9)],
)
def test_coverage_is_exact_however_wrong_the_model_is(score, scale, num_calibration, level):
    """Without ties the coverage is k / (n + 1), here for skewed data and normal predictions, one far too sure."""
    y = torch.randn(num_calibration + 1, NUM_SPLITS).exp() - 1.0
    found = coverage(y, Prediction([dist.Normal(torch.zeros(2, *y.shape), scale)]), level=level, score=score)
    expected = math.ceil((num_calibration + 1) * level) / (num_calibration + 1)
    assert level <= expected < level + 1 / (num_calibration + 1)
    assert abs(found - expected) < 3.5 * standard_error(expected)


@pytest.mark.parametrize("score", ["stddev", "quantile"])
@pytest.mark.parametrize("loc", [0.0, 1000.1])
def test_ties_leave_at_least_the_level(score, loc):
    """Rounding errors must not exclude values whose scores equal the radius."""
    y = torch.randint(-1, 2, (11, NUM_SPLITS)).double() + 0.1 * loc
    prediction = Prediction([dist.Normal(torch.full((2, *y.shape), loc / 3.0), 0.37)])
    assert coverage(y, prediction, level=0.8, score=score) > 0.8 - 3.5 * standard_error(0.8)


def test_entries_of_a_fitted_model():
    """Hidden entries are exchangeable, whatever the fit: the mean coverage over random splits is k / (n + 1)."""
    truth = torch.randn(60, 2) @ torch.randn(2, 5) + 0.3 * torch.randn(60, 5)
    hidden = torch.rand(60, 5) < 0.3
    observed = truth.masked_fill(hidden, nan)
    model = BayesianGPLVM(60, 5, latent_dim=2, num_inducing=8).initialize(observed)
    guide = MeanFieldGuide(model)
    fit(model, guide, observed, loss=MeanFieldELBO(), num_steps=30, progress=False)
    prediction = model.reconstruct(guide, observed, num_samples=16)
    entries = hidden.flatten().nonzero().squeeze(1)
    covered = []
    for _ in range(100):
        chosen = entries[torch.randperm(len(entries))[:30]]
        is_calibration = torch.zeros(300, dtype=torch.bool).index_fill(0, chosen, True).reshape(60, 5)
        calibration = calibrate(prediction, truth.masked_fill(~is_calibration, nan), level=0.8)
        lower, upper = calibration.interval(prediction)
        covered.append(((lower <= truth) & (truth <= upper))[hidden & ~is_calibration].double().mean())
    covered = torch.stack(covered)
    assert abs(covered.mean() - 25 / 31) < 3.5 * covered.std() / math.sqrt(len(covered))


def test_columns_have_radii_of_their_own():
    """Errors of two scales: pooled radii cover one column too often, and the other too rarely."""
    scales = torch.tensor([0.5, 5.0])
    y = scales * torch.randn(4000, 2)
    prediction = Prediction([dist.Normal(torch.zeros(1, 4000, 2), 1.0)])
    is_calibration = torch.arange(4000)[:, None] < 2000

    def covered(**options):
        calibration = calibrate(prediction, y.masked_fill(~is_calibration, nan), level=0.8, **options)
        lower, upper = calibration.interval(prediction)
        return calibration, ((lower <= y) & (y <= upper))[2000:].double().mean(0)

    calibration, by_column = covered(per_column=True)
    z = dist.Normal(0.0, 1.0).icdf(torch.tensor(0.9))  # of two-sided intervals that cover 80 %
    assert torch.allclose(calibration.radius, z * scales, rtol=0.1)
    assert ((by_column - 0.8).abs() < 0.04).all()
    _, pooled = covered()
    assert pooled[0] > 0.99
    assert pooled[1] < 0.7
    assert abs(pooled.mean() - 0.8) < 0.03


def test_intervals_by_the_formula():
    mean, scale = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    prediction = Prediction([dist.Normal(mean, scale).expand([1, 3])])
    y = torch.tensor([3.0, 2.0, nan])  # scores 3 and ½
    lower, upper = calibrate(prediction, y, level=0.5).interval(prediction)  # k = 2
    assert torch.allclose(lower, mean - 3.0 * scale)
    assert torch.allclose(upper, mean + 3.0 * scale)
    skewed = Prediction([dist.Exponential(torch.ones(1, 9))])
    y = torch.full((9,), 0.4)
    lower, upper = calibrate(skewed, y, level=0.9, score="quantile").interval(skewed)
    a, b = skewed.quantile([0.05, 0.95])
    radius = torch.maximum(a - 0.4, 0.4 - b).amax()  # negative: all entries are well inside
    assert radius < 0.0
    assert torch.allclose(lower, torch.minimum(a - radius, 0.5 * (a + b)))
    assert torch.allclose(upper, torch.maximum(b + radius, 0.5 * (a + b)))
    assert (lower <= upper).all()


def test_known_entries_have_their_value():
    prediction = Prediction([dist.Normal(torch.zeros(1, 12), 1.0)])
    filled = prediction.with_observed(torch.tensor([5.0] + 11 * [nan]))
    for score in ("stddev", "quantile"):
        calibration = calibrate(prediction, torch.randn(12), score=score)
        lower, upper = calibration.interval(filled)
        assert torch.allclose(torch.stack([lower[0], upper[0]]), torch.tensor(5.0))
    with pytest.raises(ValueError, match="got 1 of 12 without: an imputation has point masses"):
        calibrate(filled, torch.zeros(12))


def test_a_large_prediction_has_intervals_by_its_moments():
    prediction = Prediction([dist.Normal(torch.zeros(1, 12), 1.0)], hold_parts=False)
    lower, upper = calibrate(prediction, torch.randn(12)).interval(prediction)
    assert (lower < upper).all()
    with pytest.raises(ValueError, match="expected a prediction of at most"):
        calibrate(prediction, torch.randn(12), score="quantile")


@pytest.mark.parametrize(("level", "needed"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_number_of_entries_that_a_level_needs(level, needed):
    prediction = Prediction([dist.Normal(torch.zeros(1, 2, 100), 1.0).expand([1, 2, 100]).to_event(0)])
    y = torch.full((2, 100), nan)
    y[0, :needed] = torch.randn(needed)
    assert calibrate(prediction, y, level=level).radius == y[0, :needed].abs().max()
    y[0, 0] = nan
    with pytest.raises(ValueError, match=f"at least {needed} calibration entries for level {level}, got {needed - 1}"):
        calibrate(prediction, y, level=level)


def test_errors():
    prediction = Prediction([dist.Normal(torch.zeros(1, 20, 2), 1.0)])
    y = torch.randn(20, 2)
    few = y.clone()
    few[5:, 1] = nan
    with pytest.raises(ValueError, match=r"9 calibration entries in column 1 for level .*, got 5"):
        calibrate(prediction, few, per_column=True)
    with pytest.raises(ValueError, match="level between 0 and 1, got 90"):
        calibrate(prediction, y, level=90.0)
    with pytest.raises(ValueError, match=r"y of the shape \[20, 2\] of the prediction, got \[20\]"):
        calibrate(prediction, y[:, 0])
    with pytest.raises(ValueError, match="finite calibration entries"):
        calibrate(prediction, y.index_fill(0, torch.tensor([3]), torch.inf))
    with pytest.raises(ValueError, match="one of a single entry"):
        calibrate(Prediction([dist.Normal(torch.zeros(1), 1.0)]), torch.tensor(0.0), level=0.5, per_column=True)
    calibration = calibrate(prediction, y, per_column=True)
    with pytest.raises(ValueError, match="a prediction of the 2 columns of the calibration"):
        calibration.interval(Prediction([dist.Normal(torch.zeros(1, 20, 3), 1.0)]))


def test_errors_of_types(unchecked):
    prediction = Prediction([dist.Normal(torch.zeros(1, 20, 2), 1.0)])
    with pytest.raises(ValueError, match=r"score in .*, got 'sd'"):
        calibrate(prediction, torch.randn(20, 2), score="sd")
    with pytest.raises(TypeError, match="expected data to be tensors, got list"):
        calibrate(prediction, [[0.0, 0.0]])
