import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.models import Prediction
from pyro_lvgp.sklearn import GPVAERegressor
from pyro_lvgp.sklearn._stacked_series import _widened

N = 40


def make_series():
    t = torch.linspace(0.0, 2.0, N)
    Y = torch.sin(6.0 * t[:, None] + torch.arange(3)) * 10.0 + 100.0 + torch.randn(N, 3)
    gapped = Y.clone()
    gapped[25:33, 0] = torch.nan
    return t, Y, gapped


@pytest.fixture
def series(float64):
    return make_series()


def quick(**kwargs):
    return GPVAERegressor(n_folds=2, max_iter=10, **kwargs)


@pytest.fixture(scope="module")
def fitted():
    """Data and a fit that no test changes."""
    torch.set_default_dtype(torch.float64)
    with seeded(0):
        t, Y, gapped = make_series()
        gpvae = quick().fit(t, gapped)
    torch.set_default_dtype(torch.float32)
    return gpvae, t, Y, gapped


def briefly(X, y):
    return GPVAERegressor(n_folds=1, max_iter=2).fit(X, y).predict().mean


def test_one_output_may_be_a_vector(series):
    t, _, gapped = series
    torch.testing.assert_close(briefly(t, pd.Series(gapped[:, 0])), briefly(t, gapped[:, :1]))


def test_predictions_are_a_mixture_of_the_candidates_in_units_of_the_data(fitted, float64):
    gpvae, t, Y, gapped = fitted
    assert set(gpvae.held_out_nll_) == {"separate", "white", "rough", "smooth", "regression"}
    assert gpvae.models_.keys() == gpvae.weights_.keys() | gpvae.gap_weights_.keys()
    assert sum(gpvae.weights_.values()) == pytest.approx(1.0)
    predicted = gpvae.predict()
    assert isinstance(predicted, Prediction)
    error = (predicted.mean - Y)[25:33, 0]
    assert error.square().mean().sqrt() < 0.5 * (Y[25:33, 0] - gapped[:, 0].nanmean()).square().mean().sqrt()
    torch.testing.assert_close(predicted.coords["x"][1], t[:, None])
    by_hand = sum(weight * gpvae.models_[name].predict().mean for name, weight in gpvae.weights_.items())
    torch.testing.assert_close(predicted.mean, by_hand)


def test_fits_in_several_processes_are_those_in_one(fitted, float64):
    one, t, _, gapped = fitted
    two = quick(n_jobs=2).fit(t, gapped)
    assert two.weights_ == pytest.approx(one.weights_, abs=1e-6)
    torch.testing.assert_close(two.predict().mean, one.predict().mean, rtol=1e-6, atol=1e-6)


def test_inputs_without_data_have_weights_of_their_own(series):
    t, _, gapped = series
    gapped[10:14] = torch.nan
    gpvae = quick().fit(t, gapped)
    assert gpvae.weights_ != gpvae.gap_weights_
    predicted, is_empty = gpvae.predict(), gapped.isnan().all(1)
    y = torch.linspace(-2.0, 2.0, gapped.numel()).reshape(gapped.shape)
    for rows, weights, factors in (
        (~is_empty, gpvae.weights_, gpvae.factor_weights_),
        (is_empty, gpvae.gap_weights_, gpvae.gap_factor_weights_),
    ):
        blocks = {(name, factor): w * share for name, w in weights.items() for factor, share in factors[name].items()}
        assert sum(blocks.values()) == pytest.approx(1.0)
        widened = {block: _widened(gpvae.models_[block[0]].predict(), block[1]) for block in blocks}
        mean = sum(w * widened[block].mean for block, w in blocks.items())
        density = sum(w * widened[block].log_prob(y).exp() for block, w in blocks.items())
        torch.testing.assert_close(predicted.mean[rows], mean[rows])
        torch.testing.assert_close(predicted.log_prob(y)[rows], density[rows].log())
    ahead = gpvae.predict(t[-1:] + 0.1)
    by_hand = sum(
        weight * gpvae.models_[name].predict(t[-1:, None] / gpvae._spread + 0.1 / gpvae._spread).mean
        for name, weight in gpvae.gap_weights_.items()
    )
    torch.testing.assert_close(ahead.mean, by_hand)


def test_shared_noise_is_predicted_from_other_outputs_and_gaps_by_time(float64):
    t = torch.arange(150.0)
    shared = torch.randn(150, 1)
    walks = 3.0 * torch.randn(150, 4).cumsum(0) / 10.0
    Y = walks + shared
    Y[40:44] = torch.nan
    Y[100:110, 0] = torch.nan
    gpvae = GPVAERegressor(n_folds=2, max_iter=15).fit(t, Y)
    assert gpvae.gap_weights_.get("separate", 0.0) > gpvae.weights_.get("separate", 0.0)


def test_deviations_are_multiplied_and_means_kept(fitted, float64):
    prediction = next(iter(fitted[0].models_.values())).predict()
    widened = _widened(prediction, 2.0)
    torch.testing.assert_close(widened.mean, prediction.mean)
    torch.testing.assert_close(widened.stddev, 2.0 * prediction.stddev)
    y = prediction.mean + 3.0
    torch.testing.assert_close(widened.log_prob(y), prediction.log_prob(prediction.mean + 1.5) - np.log(2.0))


def test_predictive_variances_are_those_of_the_mixture_over_models_and_factors(fitted, float64):
    gpvae = fitted[0]
    total, mean, square = 0.0, 0.0, 0.0
    for name, shares in gpvae.factor_weights_.items():
        model = gpvae.models_[name].predict()
        for factor, share in shares.items():
            weight = gpvae.weights_[name] * share
            total, mean = total + weight, mean + weight * model.mean
            square = square + weight * (factor**2 * model.variance + model.mean**2)
    assert total == pytest.approx(1.0)
    torch.testing.assert_close(gpvae.predict().variance, square - mean**2)


def test_the_best_candidate_is_the_one_with_the_process_for_a_rough_series(float64):
    t = torch.arange(80.0)
    walk = torch.randn(80).cumsum(0)[:, None]
    Y = walk * torch.tensor([1.0, -1.0, 0.5]) + 0.05 * torch.randn(80, 3)
    Y[30:34] = torch.nan
    scores = GPVAERegressor(n_folds=2, max_iter=15).fit(t, Y).held_out_nll_
    assert scores["rough"] < scores["white"] - 0.3


def test_outputs_that_share_nothing_have_separate_processes(float64):
    t = torch.arange(120.0)
    walks = torch.randn(120, 3).cumsum(0)
    Y = torch.where(torch.rand(120, 3) < 0.1, torch.nan, walks)
    Y[50:55] = torch.nan
    gpvae = GPVAERegressor(n_folds=2, max_iter=15).fit(t, Y)
    assert max(gpvae.weights_, key=gpvae.weights_.__getitem__) == "separate"


def test_short_gaps_of_smooth_series_are_predicted_better_than_by_interpolation(float64):
    """Means of a Matérn-½ process are nearly linear in a gap; series that share nothing are no factor models."""
    t = torch.arange(120.0)
    frequency, phase = 0.1 + 0.3 * torch.rand(3, 5), 6.3 * torch.rand(3, 5)
    Y = torch.sin(frequency * t[:, None, None] + phase).sum(-1) + 0.02 * torch.randn(120, 3)
    is_hidden = (t % 30.0 >= 12.0) & (t % 30.0 < 16.0)
    gpvae = GPVAERegressor(n_folds=2, max_iter=15).fit(t, Y.masked_fill(is_hidden[:, None], torch.nan))
    assert max(gpvae.gap_weights_, key=gpvae.gap_weights_.__getitem__) == "separate"
    lines = np.stack([np.interp(t, t[~is_hidden], column[~is_hidden]) for column in Y.T], 1)
    error = [(mean - Y)[is_hidden].square().mean().sqrt() for mean in (gpvae.predict().mean, torch.as_tensor(lines))]
    assert error[0] < 0.6 * error[1]


def test_a_period_adds_a_candidate_that_continues_cycles(float64):
    t = torch.arange(96.0)
    Y = torch.sin(2.0 * np.pi * t / 24.0)[:, None] * torch.tensor([1.0, 2.0]) + 0.1 * torch.randn(96, 2)
    Y[48:72] = torch.nan
    gpvae = GPVAERegressor(period=24.0, n_folds=2, max_iter=15).fit(t, Y)
    scores = gpvae.held_out_nll_
    assert max(scores[name] for name in ("periodic", "separate")) < min(scores[name] for name in ("white", "rough", "smooth"))
    truth = 2.0 * torch.sin(2.0 * np.pi * t[48:72] / 24.0)
    assert (gpvae.predict().mean[48:72, 1] - truth).square().mean().sqrt() < 0.5


def test_outputs_that_are_no_linear_function_of_others_are_predicted_by_regression(float64):
    angle = 6.28 * torch.rand(80)
    Y = torch.stack([angle.cos(), angle.sin(), (2.0 * angle).cos(), (2.0 * angle).sin()], 1) + 0.02 * torch.randn(80, 4)
    gapped = Y.clone()
    gapped[60:70, 2:] = torch.nan
    gpvae = GPVAERegressor(n_folds=2, max_iter=20).fit(torch.arange(80.0), gapped)
    assert max(gpvae.weights_, key=gpvae.weights_.__getitem__) == "regression"
    error = (gpvae.predict().mean - Y)[60:70, 2:]
    assert error.square().mean() < 0.2 * Y[60:70, 2:].var()


def test_there_is_no_regression_for_rows_without_data_or_many_patterns(series):
    t, Y, _ = series
    empty = Y.clone()
    empty[10:14] = torch.nan
    many = torch.cat([Y, Y.square()], 1)
    for row in range(6):
        many[row, row] = torch.nan
    for data in (Y, empty, many):
        assert "regression" not in GPVAERegressor(n_folds=1, max_iter=2).fit(t, data).held_out_nll_


def test_arrays_and_data_frames_give_the_result_of_tensors(series):
    t, _, gapped = series
    expected = briefly(t, gapped)
    frame = pd.DataFrame(gapped.numpy(), columns=["a", "b", "c"])
    for X, y in ((t.numpy(), gapped.numpy()), (pd.Series(t.numpy()), frame)):
        torch.testing.assert_close(briefly(X, y), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_does_not_depend_on_the_grad_mode(series, mode):
    t, _, gapped = series
    expected = briefly(t, gapped)
    with mode():
        for X, y in ((t.clone(), gapped.clone()), (t.numpy(), gapped.numpy())):
            torch.testing.assert_close(briefly(X, y), expected)


def test_it_has_the_parameters_of_scikit_learn():
    gpvae = clone(GPVAERegressor(period=24.0, max_iter=7))
    assert gpvae.get_params() == {"period": 24.0, "n_folds": 3, "max_iter": 7, "n_jobs": None, "verbose": False}


def test_bad_arguments_raise(series):
    t, _, gapped = series
    with pytest.raises(ValueError, match="positive period"):
        quick(period=-1.0).fit(t, gapped)
    with pytest.raises(ValueError, match="positive period"):
        quick(period=1.0).fit(torch.rand(N, 2), gapped)
    with pytest.raises(ValueError, match="n_folds"):
        GPVAERegressor(n_folds=0).fit(t, gapped)
    with pytest.raises(ValueError, match="points, outputs"):
        quick().fit(t[:-1], gapped)
