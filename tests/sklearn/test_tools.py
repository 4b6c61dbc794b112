"""All transformers in scikit-learn's tools: its own checks, pipelines, searches, copies, data frames, rows without data."""

import pickle
from copy import deepcopy

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_lvgp.sklearn import GPLVM, GPLVMImputer, GPVAEImputer, RandomFeatureGPLVM

QUICK = {
    "gplvm": GPLVM(max_iter=3, n_inducing=5, random_state=0),
    "random features": RandomFeatureGPLVM(max_iter=2, n_frequencies=5, random_state=0),
    "imputer": GPLVMImputer(max_iter=2, n_folds=1, random_state=0),
    "series": GPVAEImputer(max_iter=2, n_folds=1),
}
EMBEDDINGS = ["gplvm", "random features"]
every = pytest.mark.parametrize("name", QUICK)


@pytest.mark.usefixtures("unchecked", "few_candidates")  # checks give it arguments of any kind
@parametrize_with_checks([QUICK["random features"].set_params(init="pca"), QUICK["series"]])
def test_scikit_learn_s_own_checks(estimator, check):
    check(estimator)


@pytest.fixture
def table():
    """Iris in another order, with gaps and a row without data, as a frame."""
    iris = load_iris(as_frame=True).data.sample(30, random_state=0).reset_index(drop=True)
    iris[np.random.default_rng(0).random(iris.shape) < 0.1] = np.nan
    iris.iloc[7] = np.nan
    return iris


@every
def test_rows_without_data_are_fitted_and_transformed(name, table):
    fitted = clone(QUICK[name]).fit(table)
    result = fitted.transform(table)
    assert len(result) == 30
    assert np.isfinite(result).all()
    if name != "series":  # whose empty row has a time
        alone = fitted.transform(table.iloc[[7]])
        np.testing.assert_allclose(alone, result[[7]], rtol=1e-5)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_row_without_data_has_the_mean_of_the_training_latents(name, table):
    fitted = clone(QUICK[name]).fit(table)
    others = np.delete(fitted.embedding_, 7, 0)
    np.testing.assert_allclose(fitted.embedding_[7], others.mean(0), atol=0.15)
    np.testing.assert_allclose(fitted.transform(table)[7], fitted.embedding_[7])


def test_an_imputed_row_without_data_has_the_distribution_of_the_columns(table):
    imputer = GPLVMImputer(max_iter=30, n_folds=1, random_state=0).fit(table)
    mean, stddev = imputer.transform(table, return_std=True)
    np.testing.assert_allclose(mean[7], table.mean(), atol=0.5 * table.std().max())
    np.testing.assert_allclose(stddev[7], table.std(), rtol=0.5)
    observed = table.notna().to_numpy()
    assert (stddev[observed] == 0.0).all()
    assert (stddev[~observed] > 0.0).all()


@pytest.mark.usefixtures("few_candidates")
@every
def test_pickle_joblib_deepcopy_and_clone(name, table, tmp_path):
    fitted = clone(QUICK[name]).fit(table)
    expected = fitted.transform(table)
    joblib.dump(fitted, tmp_path / "fitted.joblib")
    for copy in (pickle.loads(pickle.dumps(fitted)), joblib.load(tmp_path / "fitted.joblib"), deepcopy(fitted)):
        np.testing.assert_allclose(copy.transform(table), expected, rtol=1e-6)
    np.testing.assert_allclose(fitted.transform(table), expected, rtol=1e-6)  # a copy changes nothing
    np.testing.assert_allclose(clone(fitted).fit(table).transform(table), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("few_candidates")
@every
def test_frames_and_column_transformers(name, table):
    columns = list(table.columns[:3])
    selected = ColumnTransformer([("part", clone(QUICK[name]), columns)], remainder="passthrough")
    selected.set_output(transform="pandas")
    result = selected.fit_transform(table.set_index(table.index + 100))
    assert isinstance(result, pd.DataFrame)
    assert result.index.tolist() == list(range(100, 130))
    prefix = {"gplvm": "part__gplvm0", "random features": "part__randomfeaturegplvm0"}.get(name, f"part__{columns[0]}")
    assert result.columns[0] == prefix
    assert not result[prefix].isna().any()


SEARCHED = {
    "gplvm": {"n_components": [1, 2]},
    "random features": {"n_components": [1, 2]},
    "imputer": {"max_iter": [1]},
    "series": {"max_iter": [1, 2]},
}


@pytest.mark.usefixtures("few_candidates")
@every
@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_searches_in_pipelines_with_two_workers(name, backend, table):
    table = table.iloc[:16]
    target = np.arange(16) % 2 if name in EMBEDDINGS else table.iloc[:, 0].fillna(0.0)
    last = LogisticRegression() if name in EMBEDDINGS else LinearRegression()
    pipeline = make_pipeline(clone(QUICK[name]), last)
    grid = {f"{pipeline.steps[0][0]}__{parameter}": values for parameter, values in SEARCHED[name].items()}
    search = GridSearchCV(pipeline, grid, cv=2, n_jobs=2, error_score="raise")
    with joblib.parallel_backend(backend):
        search.fit(table, target)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.predict(table).shape == (16,)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_standard_deviations_are_in_the_units_of_the_columns(name, table):
    fitted = clone(QUICK[name]).set_params(max_iter=30).fit(table)
    mean, stddev = fitted.inverse_transform(fitted.embedding_, return_std=True)
    np.testing.assert_allclose(mean, fitted.inverse_transform(fitted.embedding_), rtol=1e-6)
    factors = np.array([1.0, 10.0, 100.0, 0.1])
    scaled = clone(fitted).fit(table * factors)
    again = scaled.inverse_transform(fitted.embedding_, return_std=True)[1]
    np.testing.assert_allclose(again / factors, stddev, rtol=1e-2)
    assert (stddev > 0.0).all()


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_warm_start_continues_where_the_fit_ended(name, table):
    fitted = clone(QUICK[name]).set_params(max_iter=40, warm_start=True).fit(table)
    first, model = fitted.history_.losses, fitted.model_
    for again in (fitted, pickle.loads(pickle.dumps(fitted))):
        again.fit(table)
        assert abs(again.history_.losses[0] - first[-1]) < 0.25 * abs(first[0] - first[-1])
    assert fitted.model_ is model
    with pytest.raises(ValueError, match="29 rows with observed entries and 4 columns of the previous fit"):
        fitted.fit(table.iloc[:20])
    with pytest.raises(ValueError, match="expected the n_components=2 of the previous fit"):
        fitted.set_params(n_components=1).fit(table)
    assert fitted.set_params(warm_start=False).fit(table).embedding_.shape == (30, 1)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_devices(name, table):
    fitted = clone(QUICK[name]).set_params(device="cpu").fit(table)
    assert fitted.model_.latent_candidates().device == torch.device("cpu")
    with pytest.raises(ValueError, match="expected a device such as"):
        clone(QUICK[name]).set_params(device="abacus").fit(table)
    with pytest.raises(ValueError, match="two rows of X or more with an observed entry, got 1"):
        clone(QUICK[name]).fit(np.array([[1.0, 2.0], [np.nan, np.nan]]))


def test_the_number_of_components_is_that_of_the_relevant_dimensions():
    rng = np.random.default_rng(0)
    angle = rng.uniform(-2.0, 2.0, (100, 1))
    curve = np.sin(angle + rng.uniform(0.0, 6.0, 8)) + 0.05 * rng.standard_normal((100, 8))
    linear = rng.standard_normal((100, 3)) @ rng.standard_normal((3, 8)) + 0.3 * rng.standard_normal((100, 8))
    auto = GPLVM("auto", n_inducing=20, max_iter=100, learning_rate=0.1, random_state=0)
    fitted = clone(auto).fit(curve)
    assert fitted.embedding_.shape == (100, fitted.model_.latent_dim)
    assert fitted.model_.latent_dim <= 2
    assert fitted.get_feature_names_out().shape == (fitted.model_.latent_dim,)
    assert clone(auto).fit(linear).model_.latent_dim in (3, 4)
    model = fitted.model_
    assert fitted.set_params(warm_start=True, max_iter=2).fit(curve).model_ is model


@pytest.mark.usefixtures("unchecked")
def test_initial_latents_of_random_features(table):
    quick = {"max_iter": 1, "n_frequencies": 5, "random_state": 0}
    by_tsne, by_default, by_pca = (RandomFeatureGPLVM(init=init, **quick).fit(table) for init in ("tsne", "auto", "pca"))
    np.testing.assert_array_equal(by_default.embedding_, by_tsne.embedding_)
    assert np.abs(by_default.embedding_ - by_pca.embedding_).max() > 0.1
    assert RandomFeatureGPLVM(4, max_iter=1, n_frequencies=5).fit(table).embedding_.shape == (30, 4)
    with pytest.raises(ValueError, match="for more than 3 latent dimensions"):
        RandomFeatureGPLVM(4, init="tsne").fit(table)
    with pytest.raises(ValueError, match="expected init in"):
        RandomFeatureGPLVM(init="umap").fit(table)


def test_series_are_filled_over_their_index():
    days = pd.date_range("2024-01-01", periods=60)
    phase = np.arange(60)[:, None] / 6.0 + np.arange(3)
    complete = pd.DataFrame(np.sin(phase), index=days, columns=list("abc"))
    gapped = complete.copy()
    gapped.iloc[30:38, 0] = np.nan
    imputer = GPVAEImputer(n_folds=2, max_iter=20).set_output(transform="pandas").fit(gapped)
    filled = imputer.transform(gapped)
    pd.testing.assert_frame_equal(filled.where(gapped.notna()), gapped)
    assert np.sqrt(np.square(filled - complete).iloc[30:38, 0].mean()) < 0.2
    later = pd.DataFrame(np.nan, index=days[-3:] + pd.Timedelta(days=3), columns=list("abc"))
    mean, stddev = imputer.transform(later, return_std=True)
    expected = imputer.regressor_.predict(later.index)
    np.testing.assert_allclose(mean, expected.mean)
    np.testing.assert_allclose(stddev, expected.stddev)
    with pytest.raises(ValueError, match="expected dates as inputs"):
        imputer.transform(later.reset_index(drop=True))
