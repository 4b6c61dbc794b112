"""Held-out densities of every model, under likelihoods for which moments would not do."""

import pytest
import torch

from pyro_lvgp.diagnostics import gap_folds, held_out_log_prob, held_out_nll, stacking_weights
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Heterogeneous, LogNormal, Poisson
from pyro_lvgp.models import GPVAE, BayesianGPLVM, Prediction, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

N, D = 20, 3
DATA = {
    "real": (lambda: Gaussian(0.3), lambda: torch.randn(N, D)),
    "positive": (lambda: LogNormal(0.3), lambda: torch.randn(N, D).exp()),
    "counts": (Poisson, lambda: torch.poisson(torch.full((N, D), 3.0))),
    "mixed": (
        lambda: Heterogeneous([(Gaussian(0.3), [0]), (Poisson(), [1]), (Bernoulli(), [2])]),
        lambda: torch.stack([torch.randn(N), torch.poisson(torch.full((N,), 3.0)), (torch.rand(N) < 0.5).float()], 1),
    ),
}


def gplvm(likelihood, y):
    model = BayesianGPLVM(N, D, 2, num_inducing=4, likelihood=likelihood()).initialize(y)
    guide = MeanFieldGuide(model)
    fit(model, guide, y, num_steps=2, progress=False)
    return model.reconstruct(guide, y, num_samples=4)


def imputed(likelihood, y):
    model = BayesianGPLVM(N, D, 2, num_inducing=4, likelihood=likelihood()).initialize(y)
    guide = MeanFieldGuide(model)
    fit(model, guide, y, num_steps=2, progress=False)
    return model.impute(guide, y, num_samples=4)


def random_features(likelihood, y):
    model = RandomFeatureLVM(N, D, 2, num_frequencies=4, likelihood=likelihood()).initialize(y)
    guide = RandomFeatureGuide(model, weights="explicit")
    fit(model, guide, y, num_steps=2, progress=False)
    return model.reconstruct(guide, y, num_samples=4)


def gp_vae(likelihood, y):
    t = torch.linspace(0.0, 1.0, N)[:, None]
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D, [4]), likelihood())
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, 2)})
    fit(model, guide, t, y, num_steps=2, progress=False)
    return model.predict(guide, t, y, num_samples=4)


def sparse_gp_vae(likelihood, y):
    t = torch.linspace(0.0, 1.0, N)[:, None]
    model = SparseGPVAE(RBF(1, batch_shape=(2,)), MLP(2, D, [4]), t[::4], likelihood())
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(D, 2)})
    fit(model, guide, t, y, num_steps=2, progress=False)
    return model.impute(guide, t, y, num_samples=4)


@pytest.mark.parametrize(("likelihood", "data"), DATA.values(), ids=DATA.keys())
def test_every_model_and_likelihood(likelihood, data):
    y = data()
    y[3, 0], y[5, 1], y[8, 2] = torch.nan, torch.nan, torch.nan
    seen = {}

    def record(name, predict):
        def call(shown):
            seen.setdefault(name, []).append(predict(likelihood, shown))
            return seen[name][-1]

        return call

    models = {model.__name__: model for model in (gplvm, imputed, random_features, gp_vae, sparse_gp_vae)}
    folds = list(gap_folds(y, 2))
    found = held_out_log_prob({name: record(name, model) for name, model in models.items()}, y, folds, progress=False)
    for name, values in found.items():
        assert all(type(prediction) is Prediction for prediction in seen[name])
        of_folds = [prediction.log_prob(y)[fold] for prediction, fold in zip(seen[name], folds, strict=True)]
        torch.testing.assert_close(values, torch.cat(of_folds))
        assert values.isfinite().all()
    assert sum(stacking_weights(found).values()) == pytest.approx(1.0)


def test_scores_by_name():
    y = torch.poisson(torch.full((N, D), 3.0))
    y[3, 0] = torch.nan
    scores = held_out_nll({"GPLVM": lambda shown: gplvm(Poisson, shown)}, y, gap_folds(y, 2), progress=False)
    assert 0.5 < scores["GPLVM"] < 10.0
