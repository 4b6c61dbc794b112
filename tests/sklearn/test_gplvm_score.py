"""Log evidence of rows under a fitted estimator, against integration over its one latent, and the selection of models."""

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV

from pyro_lvgp.likelihoods import LowRankGaussian, Poisson, RowLikelihood
from pyro_lvgp.sklearn import GPLVM
from pyro_lvgp.sklearn._pyro_state import own_parameters


def rows(num: int, seed: int) -> np.ndarray:
    """Counts of a curve, with missing entries, in columns of other scales."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num, 1))
    Y = random.poisson(np.exp(1.0 + np.sin(x + np.arange(4)))) * np.array([1.0, 1.0, 2.0, 3.0])
    Y[random.random(Y.shape) < 0.15] = np.nan
    return Y[(~np.isnan(Y)).any(1)]


def integral(gplvm: GPLVM, X: np.ndarray) -> np.ndarray:
    """Log evidence by the trapezoidal rule."""
    Y = torch.tensor(gplvm.scaler_.transform(X)).to(gplvm.model_.mean)
    grid = torch.linspace(-8.0, 8.0, 2001, dtype=Y.dtype)[:, None]
    value, observed = torch.nan_to_num(Y, gplvm.model_.likelihood.fill_value), ~torch.isnan(Y)
    with own_parameters(gplvm._local), torch.no_grad():
        prior = gplvm.model_.training_prior(gplvm.guide_, seed=gplvm._seed)
        y = gplvm.model_.predictive(gplvm.guide_, grid)
        log_evidence = []
        for entries, mask in zip(value, observed, strict=True):
            if isinstance(y.likelihood, RowLikelihood):
                many = (part.expand(len(grid), -1) for part in (entries, mask))
                log_p = y.likelihood.log_predictive_density_of_rows(*many, y.f_mean, y.f_variance, y.params)
            else:
                log_p = torch.where(mask, y.log_prob_of_entries(entries), 0.0).sum(-1)
            log_evidence.append((log_p + prior.log_prob(grid)).logsumexp(0) + (grid[1] - grid[0]).log().squeeze())
    scale = 1.0 if gplvm.scaler_.scale_ is None else gplvm.scaler_.scale_
    return torch.stack(log_evidence).numpy() - (~np.isnan(X) * np.log(scale)).sum(1)


@pytest.mark.parametrize("likelihood", [None, Poisson(), LowRankGaussian(1, 4)], ids=["Gaussian", "Poisson", "low rank"])
def test_scores_are_log_evidences(likelihood):
    train, new = rows(80, 0), rows(25, 1)
    gplvm = GPLVM(1, likelihood=likelihood, n_inducing=10, max_iter=80, random_state=0).fit(train)
    found, exact = gplvm.score_samples(new), integral(gplvm, new)
    np.testing.assert_allclose(found, exact, atol=0.5)
    assert abs((found - exact).mean()) < 0.05
    assert gplvm.score(new) == pytest.approx(found.mean())
    np.testing.assert_array_equal(found, gplvm.score_samples(new))


def test_scores_are_densities_of_the_columns_as_they_are_given():
    train, new = rows(60, 0), rows(10, 1)
    settings = {"n_inducing": 10, "max_iter": 30, "random_state": 0}
    found = [GPLVM(1, **settings).fit(factor * train).score_samples(factor * new) for factor in (1.0, 4.0)]
    np.testing.assert_allclose(found[0] - found[1], (~np.isnan(new)).sum(1) * np.log(4.0), rtol=1e-4)


def test_a_grid_search_finds_the_steps_that_a_fit_needs():
    search = GridSearchCV(GPLVM(1, n_inducing=10, random_state=0), {"max_iter": [1, 60]}, cv=2).fit(rows(60, 0))
    assert search.best_params_ == {"max_iter": 60}
    assert search.score(rows(20, 1)) > -20.0
