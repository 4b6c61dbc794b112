"""Regression and classification by shared latents: scikit-learn's own checks, gaps, rows without targets, known truth."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from pyro_lvgp.models import RowArguments
from pyro_lvgp.sklearn import GPLVMClassifier, GPLVMRegressor

QUICK = {"max_iter": 30, "n_inducing": 8, "learning_rate": 0.1, "random_state": 0}
REGRESSOR, CLASSIFIER = GPLVMRegressor(2, **QUICK), GPLVMClassifier(2, **QUICK)


OF_CLASSES = ("classifiers_classes", "one_label", "regression_target", "unfitted", "y_no_nan", "not_an_array")


def checks():
    """All checks of the regressor, and those of targets of the classifier, which shares all else."""
    yield from estimator_checks_generator(clone(REGRESSOR).set_params(max_iter=2))
    for estimator, check in estimator_checks_generator(clone(CLASSIFIER).set_params(max_iter=2)):
        if any(word in check.func.__name__ for word in OF_CLASSES):
            of_accuracy = "classes" in check.func.__name__
            yield clone(estimator).set_params(max_iter=20 if of_accuracy else 2), check


@pytest.mark.usefixtures("unchecked")  # which give it arguments of any kind
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("estimator", "check"), list(checks()), ids=lambda x: getattr(x, "func", type(x)).__name__)
def test_scikit_learn_s_own_checks(estimator, check):
    check(estimator)


def simulated(num_rows=160):
    """Inputs and a target that are functions of two latents, with gaps; the target without noise."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((num_rows, 2))
    X = np.sin(z @ rng.standard_normal((2, 8)) + rng.uniform(0.0, 6.0, 8)) + 0.1 * rng.standard_normal((num_rows, 8))
    f = 5.0 + 3.0 * np.sin(z[:, 0]) * z[:, 1]
    X[rng.random(X.shape) < 0.05] = np.nan
    return X, f, f + 0.3 * rng.standard_normal(num_rows)


def test_targets_of_new_rows_are_predicted_with_calibrated_intervals():
    X, f, y = simulated(220)
    y[:20] = np.nan  # rows without a target
    regressor = GPLVMRegressor(2, n_inducing=15, max_iter=200, learning_rate=0.1, random_state=0).fit(X[:120], y[:120])
    mean, stddev = regressor.predict(X[120:], return_std=True)
    assert np.square(mean - f[120:]).mean() < 0.5 * f.var()
    covered = np.abs(y[120:] - mean) < 1.645 * stddev
    assert abs(covered.mean() - 0.9) < 4.0 * (0.09 / 100) ** 0.5
    assert regressor.score(X[120:], y[120:]) > 0.5
    empty, wide = regressor.predict(np.full((1, 8), np.nan), return_std=True)
    np.testing.assert_allclose(empty, np.nanmean(y[:120]), atol=0.5 * f.std())  # the prediction of the prior
    np.testing.assert_allclose(wide, np.nanstd(y[:120]), rtol=0.3)
    np.testing.assert_array_equal(regressor.transform(np.full((1, 8), np.nan)), np.zeros((1, 2)))


def test_predictions_are_those_of_the_model():
    """The mixture over points of the latents against that of 256 posterior draws."""
    X, _, y = simulated()
    regressor = clone(REGRESSOR).fit(X, y)
    mean, stddev = regressor.predict(X[:5], return_std=True)
    given = {"inputs": regressor.scaler_.transform(X[:5]).astype(X.dtype)}
    slow = regressor.model_.predict_view(regressor.guide_, "target", given, num_samples=256, seed=0)
    scale = regressor.target_scaler_.scale_
    expected = regressor.target_scaler_.inverse_transform(slow.mean.numpy(force=True))[:, 0]
    np.testing.assert_allclose(mean, expected, atol=0.1 * scale[0])  # some standard errors of 64 points and 256 draws
    np.testing.assert_allclose(stddev, slow.stddev.numpy(force=True)[:, 0] * scale, rtol=0.15)


def test_several_targets_and_frames():
    X, _, y = simulated(40)
    frame = pd.DataFrame(X, columns=list("abcdefgh"))
    targets = pd.DataFrame({"p": y, "q": -y})
    regressor = clone(REGRESSOR).fit(frame, targets)
    assert regressor.predict(frame).shape == (40, 2)
    assert regressor.set_output(transform="pandas").transform(frame).columns.tolist() == ["gplvmregressor0", "gplvmregressor1"]
    assert regressor.feature_names_in_.tolist() == list("abcdefgh")


@pytest.fixture(scope="module")
def flowers():
    iris = load_iris()
    order = np.random.default_rng(0).permutation(150)
    return iris.data[order], iris.target_names[iris.target[order]]


def test_classes_of_new_rows_are_predicted(flowers):
    X, label = flowers
    y = label.astype(object)
    y[:10] = None  # rows without a class
    classifier = GPLVMClassifier(n_inducing=15, max_iter=100, learning_rate=0.1, random_state=0).fit(X[:100], y[:100])
    assert classifier.score(X[100:], label[100:]) > 0.85
    probabilities = classifier.predict_proba(X[100:])
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert classifier.embedding_.shape == (100, classifier.model_.latent_dim)
    pair = clone(CLASSIFIER).fit(X, label == "setosa")
    assert pair.predict_proba(X[:3]).shape == (3, 2)
    assert pair.score(X, label == "setosa") > 0.95


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA], ids=str)
def test_rows_without_a_class_may_be_marked_in_several_ways(missing, flowers):
    X, label = flowers[0][:40], flowers[1][:40]
    y = pd.Series([missing, *label[1:]], dtype="string" if missing is pd.NA else object)
    classifier = clone(CLASSIFIER).set_params(max_iter=2).fit(X, y)
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert classifier.model_.num_data == 40


@pytest.mark.parametrize("estimator", [REGRESSOR, CLASSIFIER], ids=["regressor", "classifier"])
def test_copies_pipelines_and_searches(estimator, flowers):
    X, label = flowers[0][:40], flowers[1][:40]
    y = label if estimator is CLASSIFIER else X[:, 0]
    pipeline = make_pipeline(StandardScaler(), clone(estimator).set_params(max_iter=2))
    fitted = pipeline.fit(X, y)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    np.testing.assert_allclose(again[:-1].transform(X), fitted[:-1].transform(X))
    search = GridSearchCV(pipeline, {f"{type(estimator).__name__.lower()}__n_components": [1, 2]}, cv=2, error_score="raise")
    assert np.isfinite(search.fit(X, y).cv_results_["mean_test_score"]).all()


def test_what_is_known_of_rows():
    X, _, y = simulated(60)
    batch = torch.arange(60) % 2
    shifted = y + 20.0 * batch.numpy()
    rows = RowArguments(covariates=torch.nn.functional.one_hot(batch, 2).double(), standard_error=torch.full((60, 9), 0.1))
    regressor = clone(REGRESSOR).fit(X, shifted, rows=rows)
    new = RowArguments(covariates=torch.eye(2).double(), standard_error=torch.zeros(2, 9))
    mean, stddev = regressor.predict(X[[0, 0]], return_std=True, rows=new)
    assert 10.0 < mean[1] - mean[0] < 30.0
    _, wider = regressor.predict(X[[0, 0]], True, new.replace(RowArguments(standard_error=torch.full((2, 9), 3.0))))
    assert (wider**2 > stddev**2 + 8.0).all()  # errors of targets, and of inputs, which determine latents
    with pytest.raises(ValueError, match="expected the covariates of these rows"):
        regressor.predict(X)
    assert regressor.score(X, shifted, rows=rows) > 0.8


@pytest.mark.usefixtures("unchecked")
def test_data_that_cannot_be_used():
    X, _, y = simulated(20)
    with pytest.raises(ValueError, match="an observed entry in every column of y"):
        clone(REGRESSOR).fit(X, np.full(20, np.nan))
    with pytest.raises(ValueError, match="two classes or more in y, got 1 class"):
        clone(CLASSIFIER).fit(X, np.zeros(20))
    with pytest.raises(ValueError, match="Unknown label type"):
        clone(CLASSIFIER).fit(X, y)
    with pytest.raises(TypeError, match="expected a likelihood with Gaussian noise for standard errors"):
        clone(CLASSIFIER).fit(X, y > 5.0, rows=RowArguments(standard_error=torch.ones(20)))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        clone(REGRESSOR).fit(X, y[:5])
