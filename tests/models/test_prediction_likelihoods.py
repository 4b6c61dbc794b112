"""Predictions under every likelihood, of models of rows and of series, against brute-force mixtures."""

import pytest
import torch

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.models import Prediction

from ._predictions import LIKELIHOODS, D, N, brute_log_prob, brute_samples, make

pytestmark = [
    pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS.keys()),
    pytest.mark.parametrize("kind", ["rows", "series"]),
]


@pytest.mark.usefixtures("float64")
def test_log_densities_are_those_of_the_mixture(kind, likelihood):
    """By 4001 nodes over f, to 1e-5 nats: the log predictive density, not a bound of it and no estimate."""
    prediction, y, *_ = make(kind, likelihood, torch.float64)
    if kind == "rows":
        assert all(isinstance(part, LikelihoodPredictive) and part.f_variance.max() > 0.01 for part in prediction.parts)
    found = prediction.log_prob(y)
    torch.testing.assert_close(found, brute_log_prob(prediction, y), rtol=0.0, atol=1e-5)
    assert torch.equal(found, prediction.log_prob(y))
    y[1, 2] = torch.nan
    again = prediction.log_prob(y)
    assert again[1, 2].isnan()
    assert torch.equal(again.isnan(), y.isnan())
    assert torch.equal(again[~y.isnan()], found[~y.isnan()])


@pytest.mark.usefixtures("float64")
def test_quantiles_are_those_of_the_mixture(kind, likelihood):
    """Shares at and below a quantile of 1000 samples, within 5 standard errors, of 20 000 samples drawn otherwise."""
    prediction, *_ = make(kind, likelihood, torch.float64)
    truth = brute_samples(prediction, 20_000)
    for q in (0.05, 0.5, 0.9):
        quantile = prediction.quantile(q)
        error = 5.0 * (q * (1.0 - q) * (1.0 / 1000 + 1.0 / 20_000)) ** 0.5
        assert ((truth <= quantile).double().mean(0) > q - error).all()
        assert ((truth < quantile).double().mean(0) < q + error).all()
    several = prediction.quantile(torch.linspace(0.0, 1.0, 21))
    assert several.shape == (21, N, D)
    assert (several.diff(dim=0) >= 0.0).all()
    assert torch.equal(several[10], prediction.quantile(0.5))


@pytest.mark.usefixtures("float64")
def test_moments_are_those_of_the_samples(kind, likelihood):
    """Within 4 standard errors of 40 000 samples."""
    prediction, *_ = make(kind, likelihood, torch.float64)
    samples = prediction.sample(40_000)
    square = (samples - prediction.mean).square()
    assert ((samples.mean(0) - prediction.mean).abs() < 4.0 * samples.std(0) / 200.0 + 1e-12).all()
    assert ((square.mean(0) - prediction.variance).abs() < 4.0 * square.std(0) / 200.0 + 1e-12).all()


@pytest.mark.usefixtures("float64")
def test_pools_weigh_whole_predictions(kind, likelihood):
    one, y, model, guide = make(kind, likelihood, torch.float64)
    if kind == "rows":
        other = model.predict(guide, torch.randn(N, 2), num_samples=4)
    else:
        other = model.predict(guide, torch.linspace(0.0, 1.0, N)[:, None], y, num_samples=4)
    pooled = Prediction.pool([one, other], [3.0, 1.0])
    densities = 0.75 * one.log_prob(y).exp() + 0.25 * other.log_prob(y).exp()
    torch.testing.assert_close(pooled.log_prob(y), densities.log())
    torch.testing.assert_close(pooled.mean, 0.75 * one.mean + 0.25 * other.mean)
    second = 0.75 * (one.variance + one.mean.square()) + 0.25 * (other.variance + other.mean.square())
    torch.testing.assert_close(pooled.variance, second - pooled.mean.square())
    samples = pooled.sample(40_000)
    assert ((samples.mean(0) - pooled.mean).abs() < 4.0 * samples.std(0) / 200.0 + 1e-12).all()


def test_precisions(kind, likelihood, dtype):
    prediction, y, *_ = make(kind, likelihood, dtype)
    found = [
        prediction.mean,
        prediction.variance,
        prediction.log_prob(y),
        prediction.sample(),
        prediction.quantile([0.1, 0.9]),
    ]
    for tensor in found:
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
        assert not tensor.requires_grad


def test_imputed_entries_are_point_masses(kind, likelihood):
    _, y, model, guide = make(kind, likelihood, torch.float32)
    y[0, 0], y[2, 1], y[3, 2] = torch.nan, torch.nan, torch.nan
    missing = y.isnan()
    data = (y,) if kind == "rows" else (torch.linspace(0.0, 1.0, N)[:, None], y)
    filled = model.impute(guide, *data, num_samples=8)
    assert torch.equal(filled.mean[~missing], y[~missing])
    assert torch.equal(filled.variance == 0.0, ~missing)
    for values in (*filled.quantile([0.1, 0.9]), *filled.sample(3)):
        assert torch.equal(values[~missing], y[~missing])
        assert values.isfinite().all()
    low, high = filled.quantile([0.0, 1.0])
    assert (low < high)[missing].all()
    truth = filled.sample(1)[0]
    log_prob = filled.log_prob(truth)
    assert (log_prob[~missing] == 0.0).all()
    assert log_prob[missing].isfinite().all()
    other = torch.where(missing, truth, y + 0.5)  # of the mixture nothing is asked there
    assert (filled.log_prob(other)[~missing] == -torch.inf).all()
    assert torch.equal(filled.log_prob(y).isnan(), missing)
