"""Arguments of rows in the estimators."""

import numpy as np
import pytest
import torch
from sklearn.base import clone

from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import RowArguments
from pyro_lvgp.sklearn import GPLVM, RandomFeatureGPLVM

N, D = 40, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((N, 1)) @ RANDOM.standard_normal((1, D)) + 0.1 * RANDOM.standard_normal((N, D))
ESTIMATORS = {
    "GPLVM": GPLVM(2, max_iter=30, n_inducing=8, random_state=0),
    "random features": RandomFeatureGPLVM(2, max_iter=5, n_frequencies=8, random_state=0),
}


def with_gap():
    data = X.copy()
    data[3], data[5, 1] = np.nan, np.nan
    return data


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_fit_transform_and_predictions_take_what_is_known_of_rows(estimator):
    rows = RowArguments(
        covariates=torch.randn(N, 2), standard_error=torch.rand(N), weight=torch.ones(N), prior_loc=torch.randn(N, 2)
    )
    estimator = clone(estimator)
    Z = estimator.fit_transform(with_gap(), rows=rows)
    assert Z.shape == estimator.embedding_.shape == (N, 2)
    np.testing.assert_allclose(Z[3], rows.prior_loc[3], rtol=1e-6)  # a row without observed entries has its prior mean
    np.testing.assert_allclose(estimator.embedding_[3], rows.prior_loc[3], rtol=1e-6)
    assert estimator.model_.rows.num_rows == N - 1
    with pytest.raises(ValueError, match="expected the covariates of these rows"):
        estimator.transform(X)
    new = RowArguments(covariates=torch.zeros(1, 2), standard_error=torch.zeros(1))
    assert estimator.transform(X[:5], rows=new).shape == (5, 2)
    mean, stddev = estimator.inverse_transform(Z[:5], return_std=True, rows=new)
    _, wider = estimator.inverse_transform(
        Z[:5], return_std=True, rows=new.replace(RowArguments(standard_error=torch.full((1,), 3.0)))
    )
    assert mean.shape == (5, D)
    np.testing.assert_allclose(wider**2 - stddev**2, 9.0, rtol=1e-4)  # in the units of X


def test_scores_of_rows_with_priors_are_evidences_under_these():
    """With noise alone the evidence is that of the noise, whatever the prior; covariates and errors are needed."""
    rows = RowArguments(standard_error=torch.full((N,), 100.0), prior_loc=torch.randn(N, 1), prior_scale=0.5)
    model = GPLVM(1, max_iter=20, n_inducing=8, random_state=0).fit(X, rows=rows)
    score = model.score_samples(X, rows=rows)
    expected = torch.distributions.Normal(0.0, 100.0).log_prob(torch.zeros(())) * D
    np.testing.assert_allclose(score, expected.expand(N), atol=0.05)
    assert model.score(X, rows=rows) == pytest.approx(score.mean())


def test_counts_with_library_sizes():
    e = np.linspace(1.0, 30.0, N)
    counts = RANDOM.poisson(e[:, None] * np.exp(X))
    rows = RowArguments(exposure=torch.as_tensor(e))
    model = GPLVM(1, likelihood=Poisson(), max_iter=200, n_inducing=8, random_state=0)
    Z = model.fit_transform(counts.astype(float), rows=rows)
    assert abs(np.corrcoef(Z[:, 0], e)[0, 1]) < 0.4
    one = model.inverse_transform(Z, rows=RowArguments(exposure=torch.ones(1)))
    assert np.corrcoef(np.log(one).ravel(), X.ravel())[0, 1] > 0.8


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_a_warm_start_needs_the_same_rows(estimator):
    rows = RowArguments(weight=torch.ones(N))
    estimator = clone(estimator).set_params(warm_start=True, max_iter=2).fit(X, rows=rows)
    estimator.fit(X, rows=rows)
    with pytest.raises(ValueError, match="expected the known quantities of rows of the previous fit"):
        estimator.fit(X)


@pytest.mark.usefixtures("unchecked")
def test_what_estimators_cannot_use():
    with pytest.raises(TypeError, match="expected rows to be RowArguments"):
        GPLVM(max_iter=2).fit(X, rows=np.ones(N))
    with pytest.raises(ValueError, match=r"expected arguments of 40 rows, or of one for all, got 3"):
        GPLVM(max_iter=2).fit(X, rows=RowArguments(weight=torch.ones(3)))
    with pytest.raises(ValueError, match="expected the number of latent dimensions of the priors of rows as n_components, 2"):
        GPLVM("auto", max_iter=2).fit(X, rows=RowArguments(prior_loc=torch.randn(N, 2)))
    with pytest.raises(ValueError, match='expected init="pca" or "auto" with priors'):
        RandomFeatureGPLVM(init="tsne", max_iter=2).fit(X, rows=RowArguments(prior_loc=torch.randn(N, 2)))
    with pytest.raises(TypeError, match="expected a likelihood with a log link"):
        GPLVM(likelihood=Gaussian(), max_iter=2).fit(X, rows=RowArguments(exposure=torch.ones(N)))
