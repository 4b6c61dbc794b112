"""What models make of predictions: components, sizes, observed entries, names of dimensions."""

import pyro
import pytest
import torch
import xarray

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian, NegativeBinomial, Poisson
from pyro_lvgp.models import GPVAE, BayesianGPLVM, Prediction, RandomFeatureLVM
from pyro_lvgp.networks import MLP, IndexNet

N, D, Q = 7, 3, 2


@pytest.fixture
def rows():
    """A model of rows, its guide and data."""
    Y = torch.poisson(torch.full((N, D), 3.0))
    model = BayesianGPLVM(N, D, Q, num_inducing=3, likelihood=Poisson()).initialize(Y)
    return model, MeanFieldGuide(model, init_scale=0.5), Y


@pytest.fixture
def series():
    """A model of two series, its guide and data."""
    x, y = torch.linspace(0.0, 1.0, N)[:, None], torch.randn(2, N, D)
    model = GPVAE(RBF(1, lengthscale=0.3, batch_shape=(Q,)), MLP(Q, D, [4]))
    return model, StructuredGPGuide(model, encoders={"f": IndexNet(D, Q)}), x, y


@pytest.mark.parametrize("term", ["svgp", "fitc", "sampled"])
def test_densities_are_log_predictive_whatever_the_bound(term):
    Y = torch.randn(N, D)
    model = BayesianGPLVM(N, D, Q, num_inducing=3, likelihood_term=term).initialize(Y)
    guide = MeanFieldGuide(model, init_scale=0.5)
    for found in (model.predict(guide, torch.randn(N, Q), num_samples=3), model.reconstruct(guide, Y, num_samples=3)):
        scale = [(part.f_variance + model.likelihood.variance.detach()).sqrt() for part in found.parts]
        each = [torch.distributions.Normal(part.f_mean, sd).log_prob(Y) for part, sd in zip(found.parts, scale, strict=True)]
        torch.testing.assert_close(found.log_prob(Y), torch.cat(each).exp().mean(0).log())


@pytest.mark.parametrize(
    ("weights", "likelihood"),
    [
        ("collapsed", lambda: Gaussian(0.3)),
        ("filled", lambda: Gaussian(0.3)),
        ("explicit", lambda: Gaussian(0.3)),
        ("collapsed", lambda: NegativeBinomial(5.0)),
        ("explicit", Poisson),
    ],
    ids=["collapsed", "filled", "explicit", "collapsed counts", "explicit counts"],
)
def test_random_features_predict_by_mixtures_too(weights, likelihood):
    Y = torch.poisson(torch.full((20, D), 3.0))
    model = RandomFeatureLVM(20, D, Q, num_frequencies=4, likelihood=likelihood()).initialize(Y)
    guide = RandomFeatureGuide(model, weights=weights)
    guide(Y)
    found = model.reconstruct(guide, Y, num_samples=3)
    densities = []
    for part in found.parts:
        f = part.f_mean + part.f_variance.sqrt() * torch.linspace(-8.0, 8.0, 2001).reshape(-1, 1, 1, 1)
        weight = (torch.linspace(-8.0, 8.0, 2001).square() * -0.5).softmax(0).reshape(-1, 1, 1, 1)
        densities.append((model.likelihood.distribution(f, part.params).log_prob(Y).exp() * weight).sum(0))
    torch.testing.assert_close(found.log_prob(Y), torch.cat(densities).mean(0).log(), rtol=1e-4, atol=1e-4)
    assert found.sample().shape == (3, 20, D)
    assert found.f_mean.shape == found.f_variance.shape == (20, D)


def test_moments_of_large_predictions_are_computed_draw_by_draw(rows, monkeypatch):
    model, guide, Y = rows
    whole, densities = [], (lambda found: found.log_prob(Y), lambda found: found.quantile(0.5), lambda found: found.sample())
    for limit in (4 * N * D, 4 * N * D - 1):
        monkeypatch.setattr(Prediction, "max_size", limit)
        pyro.set_rng_seed(1)
        whole.append((model.reconstruct(guide, Y, num_samples=4), model.impute(guide, Y, num_samples=4)))
    (held, _), (large, imputed) = whole
    for name in ("mean", "variance", "stddev", "f_mean", "f_variance"):
        assert torch.equal(getattr(held, name), getattr(large, name))
    torch.testing.assert_close(held.mean, torch.cat([part.mean for part in held.parts]).mean(0))
    assert torch.equal(imputed.mean, Y)
    for use in densities:
        assert use(held).isfinite().all()
        for found in (large, imputed):
            with pytest.raises(
                ValueError, match=r"at most 83 draws times entries .* got 4 draws of 21 entries.*; predict fewer"
            ):
                use(found)
    with pytest.raises(ValueError, match="predict fewer rows at a time, or pass a smaller num_samples"):
        Prediction.pool([held, large])
    assert set(large.to_xarray(quantiles=()).data_vars) == {"mean", "stddev"}


def test_predictions_stay_as_they_are_when_a_model_is_trained_on(rows):
    model, guide, Y = rows
    model.likelihood = NegativeBinomial(3.0)
    found = model.reconstruct(guide, Y, num_samples=3)
    before = found.log_prob(Y)
    with torch.no_grad():
        for parameter in (*model.parameters(), *guide.parameters()):
            parameter.add_(0.5)
    assert torch.equal(found.log_prob(Y), before)


def test_moments_of_the_functions_of_rows(rows):
    model, guide, Y = rows
    found = model.reconstruct(guide, Y, num_samples=5)
    assert all(isinstance(part, LikelihoodPredictive) for part in found.parts)
    f_mean = torch.cat([part.f_mean for part in found.parts])
    torch.testing.assert_close(found.f_mean, f_mean.mean(0))
    within = torch.cat([part.f_variance for part in found.parts]).mean(0)
    torch.testing.assert_close(found.f_variance, within + f_mean.var(0, correction=0))


@pytest.mark.parametrize("num_draws", [1, 6])
@pytest.mark.parametrize("likelihood", [lambda: Gaussian(0.3), Poisson], ids=["gaussian", "poisson"])
def test_moments_of_the_functions_of_series_are_those_of_the_decoder(series, likelihood, num_draws):
    model, guide, x, y = series
    model.likelihood, outputs = likelihood(), []
    model.decoder.register_forward_hook(lambda decoder, latents, f: outputs.append(f.detach()))
    found = model.predict(guide, x, y.abs().round(), num_samples=num_draws)
    f = outputs[-1]
    assert f.shape == (num_draws, 2, N, D)
    torch.testing.assert_close(found.f_mean, f.mean(0))
    torch.testing.assert_close(found.f_variance, f.var(0, correction=0))
    # The law of total variance: that of y given f, averaged, and that of its conditional mean.
    given = model.likelihood(f)
    torch.testing.assert_close(found.variance, given.variance.mean(0) + given.mean.var(0, correction=0))
    if isinstance(model.likelihood, Gaussian):
        torch.testing.assert_close(found.variance, 0.3 + found.f_variance)
        torch.testing.assert_close(found.mean, found.f_mean)


def test_moments_of_the_functions_of_pooled_series(series):
    model, guide, x, y = series
    runs = [model.predict(guide, x, y, num_samples=3) for _ in range(2)]
    (first, second), weight = runs, 0.25
    pooled = Prediction.pool(runs, [weight, 1.0 - weight])
    f_mean = weight * first.f_mean + (1.0 - weight) * second.f_mean
    between = weight * (first.f_mean - f_mean).square() + (1.0 - weight) * (second.f_mean - f_mean).square()
    torch.testing.assert_close(pooled.f_mean, f_mean)
    torch.testing.assert_close(pooled.f_variance, weight * first.f_variance + (1.0 - weight) * second.f_variance + between)
    torch.testing.assert_close(pooled.variance, pooled.f_variance + model.likelihood.variance.detach())


def test_predictions_of_distributions_of_y_alone_have_no_function_moments():
    found = Prediction([pyro.distributions.Normal(torch.zeros(2, N, D), 1.0)])
    for name in ("f_mean", "f_variance"):
        with pytest.raises(ValueError, match=r"expected a prediction with function values, got distributions of y alone"):
            getattr(found, name)
    assert Prediction.pool([found, found])._f_moments is None


def test_dimensions_of_rows(rows):
    model, guide, Y = rows
    idx = torch.tensor([4, 2])
    table = model.reconstruct(guide, Y[idx], idx, num_samples=4).to_xarray()
    assert isinstance(table, xarray.Dataset)
    assert table["mean"].dims == table["stddev"].dims == ("data", "output")
    assert table["quantiles"].dims == ("quantile", "data", "output")
    assert table["data"].values.tolist() == [4, 2]
    assert table["quantile"].values.tolist() == [0.05, 0.5, 0.95]
    prediction = model.predict(guide, torch.zeros(5, Q), num_samples=4)
    table = prediction.to_xarray([0.25])
    assert dict(table.sizes) == {"data": 5, "output": D, "quantile": 1}
    assert table["data"].values.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(torch.as_tensor(table["mean"].values), prediction.mean)
    torch.testing.assert_close(torch.as_tensor(table["stddev"].values), prediction.stddev)
    torch.testing.assert_close(torch.as_tensor(table["quantiles"].sel(quantile=0.25).values), prediction.quantile(0.25))


def test_dimensions_of_series(series):
    model, guide, x, y = series
    table = model.impute(guide, x, y, num_samples=3).to_xarray()
    assert table["mean"].dims == ("series", "points", "output")
    assert table["x"].dims == ("points", "input")
    torch.testing.assert_close(torch.as_tensor(table["x"].values), x)
    ahead = model.forecast(guide, x.expand(2, N, 1), y, 4, num_samples=3).to_xarray()
    assert dict(ahead.sizes) == {"series": 2, "points": 4, "output": D, "input": 1, "quantile": 3}
    assert ahead["x"].dims == ("series", "points", "input")
    one = model.predict(guide, x, y[0], torch.rand(5, 1), num_samples=3).to_xarray()
    assert one["mean"].dims == ("points", "output")
    assert dict(one.sizes) == {"points": 5, "output": D, "input": 1, "quantile": 3}
