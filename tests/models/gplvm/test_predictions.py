"""Predictions and imputations."""

import copy
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample
from torch import nn

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM, LatentVariableModel, RandomFeatureLVM
from pyro_lvgp.models._given_latents import global_draws
from pyro_lvgp.networks import IndexNet
from tests.models.gplvm._models import D, M, Q, make_model, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def test_predict_equals_exact_regression_when_every_input_is_an_inducing_point():
    """With Z = X and the optimal q(u), the sparse model is exact Gaussian process regression."""
    X, X_new, y = torch.randn(M, 1), torch.randn(7, 1), torch.randn(M, 1)
    model = BayesianGPLVM(M, 1, 1, RBF(1, lengthscale=0.7), num_inducing=M, likelihood=Gaussian(0.2))
    model.inducing_points = X
    k, noise = model.kernel, 0.2
    A = torch.linalg.cholesky(k(X)).mT
    precision = torch.eye(M) + A @ A.mT / noise
    guide = MeanFieldGuide(model)
    guide(y)
    guide.locs.u = torch.linalg.solve(precision, A @ y / noise).mT
    guide.scales.u = torch.linalg.cholesky(torch.linalg.inv(precision))[None]
    with torch.no_grad():
        K = k(X) + noise * torch.eye(M)
        mean = k(X_new, X) @ torch.linalg.solve(K, y)
        variance = (1.0 - (k(X_new, X) * torch.linalg.solve(K, k(X, X_new)).mT).sum(-1, keepdim=True)) + noise
    prediction = model.predict(guide, X_new, num_samples=600)
    assert ((prediction.mean - mean).abs() < 4.5 * (variance / 600).sqrt()).all()
    torch.testing.assert_close(prediction.variance, variance, rtol=0.1, atol=0.0)


def test_predictions_want_draws_and_latents_that_fit(Y, unchecked):
    model = BayesianGPLVM(len(Y), D, 2, num_inducing=5).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    for predict in (partial(model.predict, guide, torch.randn(3, 2)), partial(model.reconstruct, guide, Y)):
        with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
            predict(num_samples=0)
    with pytest.raises(ValueError, match=r"expected X of shape \[rows, 2\], got \[3, 5\]"):
        model.predict(guide, torch.randn(3, 5))
    for latents in (torch.randn(1, 2), dist.Normal(torch.zeros(1, 2), 1.0).to_event(1)):
        with pytest.raises(ValueError, match=r"expected latents \[3, 2\], one for each row, got \[1, 2\]"):
            model.impute(guide, Y[:3], latents=latents)
    of_one_row = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    for use in (lambda: model.predict(guide, of_one_row), lambda: model.impute(guide, Y[:2], latents=of_one_row)):
        with pytest.raises(ValueError, match=r"got \[2\]; use \.expand\(\[rows\]\) on the distribution"):
            use()
    assert model.predict(guide, of_one_row.expand([4])).mean.shape == (4, D)
    for prior in (dist.Normal(torch.zeros(2), 1.0), dist.Normal(torch.zeros(3), 1.0).to_event(1)):
        with pytest.raises(ValueError, match=r"expected a prior of one row's 2 latents"):
            model.infer_latents(guide, Y[:3], prior=prior)
    with pytest.raises(ValueError, match="expected num_steps of 0 or more, got -3"):
        model.infer_latents(guide, Y[:3], num_steps=-3)


class _OfCompleteRows(nn.Module):
    """An encoder with no place for gaps, and statistics of a batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, y):
        loc, raw = self.net(y).chunk(2, -1)
        return loc, nn.functional.softplus(raw)


@pytest.mark.parametrize("kind", ["mean field", "annealed", "random features, collapsed", "random features, explicit"])
def test_predictions_ask_no_encoder_about_rows_that_are_not_there(kind):
    Y, encoder = torch.randn(12, D), _OfCompleteRows()
    if kind.startswith("random"):
        model = RandomFeatureLVM(12, D, 2, num_frequencies=4).initialize(Y)
        guide = RandomFeatureGuide(model, weights=kind.split(", ")[1], encoders={"X": encoder})
    else:
        model = BayesianGPLVM(12, D, 2, num_inducing=5).initialize(Y)
        guide = MeanFieldGuide(model, encoders={"X": encoder})
        guide = AutoAnnealedLangevin(model, num_steps=2, base_guide=guide) if kind == "annealed" else guide
    guide(Y)
    latents = model.infer_latents(guide, Y[:4], num_steps=0)
    torch.testing.assert_close(latents.mean, encoder.eval()(Y[:4])[0].detach())
    for mean in (model.predict(guide, latents).mean, model.predictive(guide, torch.zeros(2, 2)).mean):
        assert mean.isfinite().all()


def test_predictions_run_in_evaluation_mode(Y):
    """Dropout is off, running statistics stay as they are, and each module is in its own mode afterwards."""
    model = make_model().initialize(Y)
    encoder = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5), IndexNet(D, Q))
    guide = MeanFieldGuide(model, encoders={"X": encoder})
    guide(Y)
    encoder[0].eval()  # a part that is held
    before = copy.deepcopy(encoder.state_dict()), [part.training for part in guide.modules()]

    def predictions():
        latents = model.infer_latents(guide, Y, num_steps=0)
        with seeded(0):
            return latents.mean, model.reconstruct(guide, Y).mean, model.predict(guide, latents).mean

    in_training = predictions()
    torch.testing.assert_close((encoder.state_dict(), [part.training for part in guide.modules()]), before)
    guide.eval()
    torch.testing.assert_close(in_training, predictions())


def test_globals_are_those_of_the_guide():
    """Moments of what is drawn for predictions, and of the guide's own draws."""
    Y = torch.randn(12, D)
    for make in (MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=2)):
        pyro.clear_param_store()
        model = BayesianGPLVM(12, D, 2, num_inducing=5).initialize(Y)
        model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 0.3).expand([2]).to_event(1))
        guide = make(model)
        guide(Y)
        with pyro.plate("draws", 400, dim=-2):
            own = guide(Y)
        drawn = list(global_draws(model, guide, 400))
        assert drawn[0].keys() == {"u", "kernel.lengthscale"}
        for name in drawn[0]:
            b = torch.stack([draw[name] for draw in drawn]).detach()
            a = own[name].detach().reshape(b.shape)
            error = ((a.var(0) + b.var(0)) / 400).sqrt()
            assert ((a.mean(0) - b.mean(0)).abs() < 5.0 * error).all(), name


def test_predictions_refuse_guides_that_lack_a_site(Y):
    model = BayesianGPLVM(len(Y), D, 2, num_inducing=5).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    X = torch.zeros(2, 2)
    for use in (lambda: model.predict(guide, X), lambda: model.predictive(guide, X), lambda: model.reconstruct(guide, Y)):
        with pytest.raises(ValueError, match=r"a guide of all latent sites .* got one without \['kernel.lengthscale'\]"):
            use()


def test_predictions_want_moments_from_a_model_of_one_s_own():
    class Linear(LatentVariableModel):
        likelihood = Gaussian(0.1)

        def latent_candidates(self):
            return torch.zeros(1, 2)

        def forward(self, y=None, idx=None):
            with self.data_plate(y, idx):
                X = pyro.sample("X", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                return pyro.sample("y", dist.Normal(X, 0.3).to_event(1), obs=y)

    Y = torch.zeros(3, 2)
    model = Linear(3, 2, 2)
    guide = MeanFieldGuide(model)
    guide(Y)
    for use in (lambda: model.predict(guide, Y), lambda: model.predictive(guide, Y), lambda: model.reconstruct(guide, Y)):
        with pytest.raises(TypeError, match=r"around a LikelihoodPredictive at the site 'y' .* got Independent\(Normal"):
            use()


def test_impute_keeps_what_is_observed(Y):
    model = make_model().initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    holes = with_holes(Y)
    for filled in (
        model.impute(guide, holes, num_samples=4),
        model.impute(guide, holes[:4], torch.arange(4), num_samples=4),
        model.impute(guide, holes, latents=model.infer_latents(guide, holes, num_steps=2), num_samples=4),
    ):
        seen = ~torch.isnan(holes[: len(filled.mean)])
        assert torch.equal(filled.mean[seen], holes[: len(filled.mean)][seen])
        assert (filled.variance[seen] == 0).all()
        assert (filled.variance[~seen] > 0).all()
        assert filled.mean.isfinite().all()
