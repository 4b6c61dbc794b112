"""The imputer by scikit-learn's own checks, and against the conditional distributions that data were drawn from."""

import pickle

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_lvgp.conjugate.gaussian_mixture import GaussianMixture, gaussian_mixture
from pyro_lvgp.sklearn import GPLVMImputer, _candidates
from pyro_lvgp.sklearn._candidates import Gaussians, candidates, most_rows
from pyro_lvgp.sklearn._known_table import KnownTable
from pyro_lvgp.sklearn._posterior_points import posterior_points
from pyro_lvgp.sklearn.gplvm_imputer import _component_moments

QUICK = {"max_iter": 2, "n_folds": 1, "random_state": 0}


@pytest.mark.usefixtures("unchecked", "few_candidates")  # checks give it arguments of any kind
@parametrize_with_checks([GPLVMImputer(**QUICK)])
def test_scikit_learn_s_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(("num_rows", "number"), [(24, 8), (99, 8), (100, 4), (250, 4), (400, 2), (800, 1)])
def test_as_many_folds_as_hold_out_100_rows_by_default(num_rows, number):
    imputer = GPLVMImputer()
    imputer._seed = 0
    held_out = torch.stack(list(imputer._held_out(torch.zeros(num_rows, 2))))
    assert len(held_out) == number
    assert (held_out.sum(1) == num_rows // 8).all()
    assert (held_out.sum(0) <= 1).all()


@pytest.fixture(scope="module")
def factors():
    """Rows of a factor model, exponentials in the first two columns; the covariance; training and new rows."""
    rng = np.random.default_rng(0)
    loadings = rng.standard_normal((8, 2))
    normal = rng.standard_normal((450, 2)) @ loadings.T + 0.5 * rng.standard_normal((450, 8))
    covariance = loadings @ loadings.T + 0.25 * np.eye(8)
    return normal, covariance


def _warped(normal):
    return np.concatenate([np.exp(0.5 * normal[:, :2]), normal[:, 2:]], 1)


def _conditional(normal, hidden, covariance):
    """Mean and standard deviation of hidden entries given the others, row by row."""
    mean, stddev = normal.copy(), np.zeros_like(normal)
    for n, m in enumerate(hidden):
        gain = np.linalg.solve(covariance[~m][:, ~m], covariance[~m][:, m])
        mean[n, m] = normal[n, ~m] @ gain
        stddev[n, m] = np.sqrt(np.diag(covariance[m][:, m] - covariance[m][:, ~m] @ gain))
    return mean, stddev


def test_predictions_are_close_to_those_of_the_true_distribution(factors):
    """Mean log density within .1 nats of the oracle's, RMSE within 10 %, coverage of 90 % intervals within .85 and .95."""
    normal, covariance = factors
    train, test = _warped(normal[:300]), _warped(normal[300:])
    hidden = np.random.default_rng(1).random(test.shape).argsort(1).argsort(1) < 3
    imputer = GPLVMImputer(max_iter=75, n_folds=2, random_state=0).fit(train)
    predicted = imputer.predictive(np.where(hidden, np.nan, test))
    mean, stddev = _conditional(normal[300:], hidden, covariance)
    plain = hidden.copy()
    plain[:, :2] = False  # columns whose oracle is normal
    rmse = [np.sqrt(np.square((each - test)[plain]).mean()) for each in (predicted.mean.numpy(), mean)]
    assert rmse[0] < 1.1 * rmse[1]
    oracle = torch.distributions.Normal(torch.tensor(mean[hidden]), torch.tensor(stddev[hidden]))
    y = torch.tensor(np.where(hidden, test, np.nan))
    slope = np.where(np.arange(8) < 2, 0.5 * test, 1.0)[hidden]  # dy/dz of y = exp(z / 2)
    expected = oracle.log_prob(torch.tensor(normal[300:][hidden])) - torch.tensor(slope).log()
    assert predicted.log_prob(y)[torch.tensor(hidden)].mean() > expected.mean() - 0.1
    lower, upper = predicted.quantile([0.05, 0.95])
    assert 0.85 < ((lower <= y) & (y <= upper))[torch.tensor(hidden)].double().mean() < 0.95


@pytest.fixture(scope="module")
def fitted(factors):
    Y = _warped(factors[0][:40])
    Y[np.random.default_rng(2).random(Y.shape) < 0.2] = np.nan
    return Y, GPLVMImputer(max_iter=3, n_folds=2, random_state=0).fit(Y)


def test_observed_entries_stay_and_missing_ones_have_the_predictive_mean(fitted):
    Y, imputer = fitted
    filled, predicted = imputer.transform(Y), imputer.predictive(Y)
    missing = np.isnan(Y)
    np.testing.assert_array_equal(filled[~missing], Y[~missing])
    assert np.isfinite(filled).all()
    assert (predicted.variance.numpy()[missing] > 0.0).all()
    assert not predicted.variance.numpy()[~missing].any()
    assert sum(imputer.weights_.values()) == pytest.approx(1.0, abs=0.03)
    assert all(len(fits) == 2 for fits in imputer.fits_.values())


def test_a_fit_repeats_and_goes_by_pickle(fitted):
    Y, imputer = fitted
    again = GPLVMImputer(max_iter=3, n_folds=2, random_state=0).fit(Y)
    np.testing.assert_allclose(again.transform(Y), imputer.transform(Y), rtol=1e-6)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(imputer)).transform(Y), imputer.transform(Y), rtol=1e-6)


def test_rows_with_the_only_entry_of_a_column_are_not_held_out():
    Y = np.random.default_rng(0).standard_normal((8, 3))
    Y[1:, 2] = np.nan
    for seed in range(8):  # one of which would hold out the first row
        imputer = GPLVMImputer(**(QUICK | {"random_state": seed}))
        imputer._seed = seed
        (held_out,) = imputer._held_out(torch.tensor(Y))
        assert not held_out[0]
    assert np.isfinite(GPLVMImputer(**QUICK).fit(Y).transform(Y)).all()


def test_points_of_latents_have_the_moments_of_the_mixture():
    covariance = torch.tensor([[0.5, 0.2], [0.2, 0.3]]).expand(1, 2, 2, 2)
    parts = dist.MultivariateNormal(torch.tensor([[[-1.0, 0.0], [2.0, 1.0]]]), covariance)
    q = dist.MixtureSameFamily(dist.Categorical(torch.tensor([[0.25, 0.75]])), parts)
    points = posterior_points(q, 4000)[:, 0]
    error = 4.0 * (q.variance[0] / 4000).sqrt()
    assert ((points.mean(0) - q.mean[0]).abs() < error).all()
    torch.testing.assert_close(points.var(0), q.variance[0], rtol=0.1, atol=0.0)
    one = dist.MultivariateNormal(parts.loc[:, 0], parts.covariance_matrix[:, 0])
    assert ((posterior_points(one, 4000)[:, 0].mean(0) - one.mean[0]).abs() < error).all()


def test_components_are_chosen_by_their_probabilities():
    """A quarter and three quarters of the points of a row without observed entries; one component if an entry tells which."""
    mixture = GaussianMixture(
        torch.tensor([0.25, 0.75], dtype=torch.float64),
        torch.tensor([[-9.0, 0.0], [9.0, 1.0]], dtype=torch.float64),
        torch.tensor([[[1.0, 0.5], [0.5, 2.0]], [[1.0, 0.0], [0.0, 3.0]]], dtype=torch.float64),
    )
    T = torch.tensor([[torch.nan, torch.nan], [-8.0, torch.nan]], dtype=torch.float64)
    ((mean, variance),) = _component_moments(mixture, T)
    torch.testing.assert_close(mean[:, 0].mean(0), mixture.weight @ mixture.mean)
    torch.testing.assert_close(mean[:, 1, 1], torch.full_like(mean[:, 1, 1], 0.5))
    torch.testing.assert_close(variance[:, 1, 1], torch.full_like(mean[:, 1, 1], 2.0 - 0.5**2))


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((40, 5), [1, 3, 3]), ((250, 15), [1, 20, 20]), ((10_000, 60), [1, 20, 20]), ((300, 500), [1]), ((100, 1000), [])],
)
def test_mixtures_that_take_long_are_no_candidates(shape, numbers):
    sizes = candidates(KnownTable(torch.zeros(shape), None))
    assert [size.number for size in sizes if isinstance(size, Gaussians)] == numbers


def test_mixtures_are_fitted_to_as_many_rows_as_their_cost_allows(monkeypatch):
    Y = torch.zeros(10_000, 60)
    assert most_rows(Y, 1) == (200_000_000 - 60**3) // 60**2
    Y[:, :30] = torch.nan
    assert most_rows(Y, 20) == (10_000_000 - 60**3) // (30**3 + 60**2)
    imputer = GPLVMImputer(**QUICK)
    imputer._seed = 0
    monkeypatch.setattr(_candidates, "_MAX_COST", 3 * (4**3 + 80 * 4**2))
    Y = torch.randn(100, 4, dtype=torch.float64)
    rows = Y[torch.randperm(100, generator=torch.Generator().manual_seed(0))[:80].sort().values]
    found, want = imputer._fit(KnownTable(Y, None), Gaussians(3, power=True), 0), gaussian_mixture(rows, 3)
    torch.testing.assert_close(found.covariance, want.covariance)


def test_columns_of_groups_are_predicted_best_without_power_transformation():
    """Groups with equal distances are normal within, and a power that makes the columns more normal stretches some of them."""
    rng = np.random.default_rng(5)
    groups = rng.choice(4, 300, p=[0.55, 0.25, 0.12, 0.08])
    Y = 5.0 * groups[:, None] * np.ones(4) + rng.standard_normal((300, 4)) @ np.linalg.cholesky(0.2 * np.eye(4) + 0.8).T
    imputer = GPLVMImputer(max_iter=2, n_folds=2, random_state=0).fit(Y)
    weights = {power: imputer.weights_.get(Gaussians(20, power), 0.0) for power in (True, False)}
    assert weights[False] > 2.0 * weights[True]


@pytest.mark.parametrize("power", [True, False])
def test_densities_of_hidden_entries_are_those_of_the_data(power):
    """Candidates with other transformations are compared in the units of the data."""
    Y = torch.randn(40, 3, dtype=torch.float64).exp()
    imputer = GPLVMImputer(**QUICK).fit(Y.numpy())
    held_out = torch.arange(40) < 6
    mixture, log_prob = imputer._fit_and_score(KnownTable(Y, None), Y.dtype, Gaussians(2, power), 0, held_out)
    hidden = imputer._hidden(Y[held_out], 0)
    gaps = Y[held_out].masked_fill(hidden, torch.nan)
    imputer.fits_, imputer.weights_ = {Gaussians(2, power): [mixture]}, {Gaussians(2, power): 1.0}
    imputer._factors = {Gaussians(2, power): torch.eye(7, dtype=torch.float64)[2]}
    predicted = imputer.predictive(gaps.numpy()).log_prob(torch.where(hidden, Y[held_out], torch.nan))
    torch.testing.assert_close(log_prob[2], predicted[hidden])


def test_linear_relations_of_few_rows_are_predicted_by_gaussians():
    """Barely fitted models leave weight to Gaussians, and the RMSE is within 15 % of that of the true conditional means."""
    rng = np.random.default_rng(3)
    loadings = rng.standard_normal((6, 1))
    normal = rng.standard_normal((140, 1)) @ loadings.T + 0.5 * rng.standard_normal((140, 6))
    hidden = rng.random((100, 6)).argsort(1).argsort(1) < 2
    imputer = GPLVMImputer(max_iter=2, n_folds=2, random_state=0).fit(normal[:40])
    assert sum(weight for size, weight in imputer.weights_.items() if isinstance(size, Gaussians)) > 0.05
    filled = imputer.transform(np.where(hidden, np.nan, normal[40:]))
    mean, _ = _conditional(normal[40:], hidden, loadings @ loadings.T + 0.25 * np.eye(6))
    error = [np.sqrt(np.square((each - normal[40:])[hidden]).mean()) for each in (filled, mean)]
    assert error[0] < 1.15 * error[1]


def test_data_that_cannot_be_used_are_refused(fitted):
    Y, _ = fitted
    with pytest.raises(ValueError, match="an observed entry in every column of X"):
        GPLVMImputer(**QUICK).fit(np.where(np.arange(8) == 2, np.nan, Y))
    with pytest.raises(ValueError, match="expected n_folds of 1 or more, got 0"):
        GPLVMImputer(n_folds=0).fit(Y)


def test_fits_in_several_processes_are_those_in_one(factors):
    Y = _warped(factors[0][:24, :4])
    Y[::3, 2] = np.nan
    one, two = (GPLVMImputer(**QUICK, n_jobs=n_jobs).fit(Y) for n_jobs in (None, 2))
    assert one.weights_.keys() == two.weights_.keys()
    np.testing.assert_allclose(two.transform(Y), one.transform(Y), rtol=1e-6, atol=1e-8)
