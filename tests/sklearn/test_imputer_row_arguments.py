"""What is known of each row in the imputer of tables."""

import pickle

import numpy as np
import pytest
import torch

from pyro_lvgp.models import RowArguments
from pyro_lvgp.sklearn import GPLVMImputer, _candidates
from pyro_lvgp.sklearn._candidates import candidates
from pyro_lvgp.sklearn._known_table import KnownTable
from pyro_lvgp.sklearn.gplvm_imputer import _log_prob

N, D = 48, 5
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((N, 1)) @ RANDOM.standard_normal((1, D)) + 0.2 * RANDOM.standard_normal((N, D))
BATCH = RANDOM.integers(2, size=N)
ONE_HOT = torch.nn.functional.one_hot(torch.tensor(BATCH), 2).double()
QUICK = {"max_iter": 2, "n_folds": 1, "random_state": 0}


@pytest.fixture(autouse=True)
def one_candidate(monkeypatch):
    monkeypatch.setattr(_candidates, "_SIZES", ((2, 2),))


def with_gaps():
    data = X.copy()
    data[np.random.default_rng(1).random(X.shape) < 0.1] = np.nan
    data[3] = np.nan
    return data


def test_missing_entries_follow_the_covariates_of_their_rows():
    """Rows of which nothing is observed have the means of their batch, which differ by some twenty standard deviations."""
    data = with_gaps() + 30.0 * BATCH[:, None]
    rows = RowArguments(covariates=ONE_HOT)
    imputer = GPLVMImputer(max_iter=25, n_folds=1, random_state=0)
    filled = imputer.fit_transform(data, rows=rows)
    observed = ~np.isnan(data)
    np.testing.assert_array_equal(filled[observed], data[observed])
    assert np.abs(filled[3] - 30.0 * BATCH[3]).max() < 10.0
    new = RowArguments(covariates=torch.eye(2).double())
    empty = imputer.predictive(np.full((2, D), np.nan), rows=new)
    assert np.abs(empty.mean.numpy() - np.array([[0.0], [30.0]])).max() < 10.0
    assert list(imputer.fits_) == [(2, 2)]  # no Gaussians
    again = pickle.loads(pickle.dumps(imputer)).transform(data, rows=rows)
    np.testing.assert_allclose(again, filled, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="expected the covariates of these rows"):
        imputer.transform(data)
    with pytest.raises(ValueError, match=r"expected no \['standard_error'\] of rows"):
        imputer.transform(data, rows=rows.replace(RowArguments(standard_error=torch.ones(N).double())))


def test_rows_of_weight_zero_are_left_out():
    data = with_gaps()
    weight = torch.ones(N).double()
    weight[5:15] = 0.0
    spoilt = data.copy()
    spoilt[5:15] *= 1e3
    weighted = GPLVMImputer(**QUICK).fit(spoilt, rows=RowArguments(weight=weight))
    without = GPLVMImputer(**QUICK).fit(np.delete(data, range(5, 15), 0), rows=RowArguments(weight=torch.ones(1)))
    assert weighted.weights_ == without.weights_
    np.testing.assert_array_equal(weighted.transform(data), without.transform(data))


def test_weights_of_rows_are_those_of_their_hidden_entries():
    imputer = GPLVMImputer(**QUICK)
    imputer._seed = 0
    T = KnownTable(torch.tensor(X), RowArguments(weight=torch.arange(N).double()))
    folds = list(enumerate(imputer._held_out(T.values)))
    weight = imputer._weights_of_hidden(T, folds)
    ((_, held_out),) = folds
    numbers = imputer._hidden(T.values[held_out], 0).sum(1)
    expected = held_out.nonzero()[:, 0].repeat_interleave(numbers).tolist()
    assert weight.tolist() == expected


def test_predictions_of_missing_entries_include_their_standard_errors():
    """Columns are standardised alone, so that variances add in the units of the columns."""
    data, error = 7.0 * with_gaps(), torch.full((N, D), 0.1).double()
    imputer = GPLVMImputer(max_iter=10, n_folds=1, random_state=0).fit(data, rows=RowArguments(standard_error=error))
    gapped = data[:4].copy()
    gapped[:, 1] = np.nan
    mean, stddev = imputer.transform(gapped, True, RowArguments(standard_error=torch.full((1, D), 0.1)))
    large = RowArguments(standard_error=torch.tensor([[0.1, 5.0, 0.1, 0.1, 0.1]]))
    same, wider = imputer.transform(gapped, True, large)
    np.testing.assert_allclose(same[:3], mean[:3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose((wider**2 - stddev**2)[:, 1], 25.0 - 0.01, rtol=1e-2)


def test_entries_with_large_errors_have_little_influence():
    """One factor, of which half of the entries tell little: without errors nothing tells which."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((60, 1)) * np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    error = np.where(rng.random(truth.shape) < 0.5, 0.1, 2.0)
    hidden = rng.random(truth.shape) < 0.15
    table = np.where(hidden, np.nan, truth + error * rng.standard_normal(truth.shape))
    root = []
    for rows in (RowArguments(standard_error=torch.tensor(error)), None):
        filled = GPLVMImputer(max_iter=20, n_folds=1, random_state=0).fit_transform(table, rows=rows)
        root.append(np.sqrt(np.square(filled - truth)[hidden].mean()))
    assert root[0] < 0.8 * root[1]


def test_factors_multiply_the_standard_deviations_of_models_alone():
    error = torch.tensor([[3.0, 0.0]]).double()
    T = KnownTable(torch.zeros(1, 2).double(), RowArguments(standard_error=error))
    found = _log_prob(torch.zeros(1, 1, 2).double(), torch.full((1, 1, 2), 4.0).double(), T)
    expected = torch.distributions.Normal(0.0, torch.tensor([[[13.0**0.5, 2.0]], [[5.0, 4.0]]]).double()).log_prob(T.values)
    torch.testing.assert_close(found[[0, 2]], expected)  # of factors 0.5 and 1


def test_priors_of_latents_determine_the_dimensions_of_the_models():
    rows = RowArguments(prior_loc=torch.tensor(X[:, :2]), prior_scale=0.5)
    assert candidates(KnownTable(torch.zeros(N, D), rows)) == [(2, 2)]
    imputer = GPLVMImputer(**QUICK).fit(with_gaps(), rows=rows)
    prior = RowArguments(prior_loc=torch.tensor([[3.0, -3.0]]), prior_scale=0.01)
    fitted = next(iter(imputer.fits_.values()))[0]
    for values in (torch.full((1, D), torch.nan), torch.zeros(1, D)):
        table = KnownTable(values.double(), prior.to(torch.float64))
        points = imputer._latents(fitted, table)
        assert (points - prior.prior_loc).abs().max() < 0.1
    assert imputer.transform(with_gaps()[:4]).shape == (4, D)  # under the mixture of the training latents


@pytest.mark.usefixtures("unchecked")
def test_what_the_imputer_cannot_use():
    with pytest.raises(TypeError, match="expected rows without exposure"):
        GPLVMImputer(**QUICK).fit(X, rows=RowArguments(exposure=torch.ones(N)))
    with pytest.raises(TypeError, match="expected rows to be RowArguments"):
        GPLVMImputer(**QUICK).fit(X, rows=np.ones(N))
    with pytest.raises(ValueError, match="of 48 rows, or of one for all, got 3"):
        GPLVMImputer(**QUICK).fit(X, rows=RowArguments(weight=torch.ones(3)))
    with pytest.raises(ValueError, match="expected 4 rows of X or more"):
        GPLVMImputer(**QUICK).fit(X, rows=RowArguments(weight=torch.zeros(N)))
