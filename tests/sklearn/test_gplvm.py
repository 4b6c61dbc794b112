"""The estimator by scikit-learn's own checks, and against the model that it wraps."""

import pickle

import numpy as np
import pyro
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Bernoulli
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.sklearn import GPLVM


@pytest.mark.usefixtures("unchecked")  # which give it arguments of any kind
@parametrize_with_checks([GPLVM(max_iter=3, n_inducing=5, random_state=0)])
def test_scikit_learn_s_own_checks(estimator, check):
    check(estimator)


@pytest.fixture
def iris():
    return load_iris().data.astype(np.float32)


def test_it_is_the_model_under_a_mean_field_guide(iris):
    """And leaves Pyro's parameters and the global random state alone."""
    pyro.param("mine", torch.ones(()))
    state = torch.get_rng_state()
    gplvm = GPLVM(max_iter=100, batch_size=50, random_state=3).fit(iris)
    assert list(pyro.get_param_store()) == ["mine"]
    assert torch.equal(torch.get_rng_state(), state)
    Y, seed = torch.tensor((iris - iris.mean(0)) / iris.std(0)), int(np.random.RandomState(3).randint(2**31 - 1))
    model = BayesianGPLVM(150, 4, 2).initialize(Y, seed=seed)
    guide, settings = MeanFieldGuide(model), {"num_steps": 100, "batch_size": 50, "seed": seed, "progress": False}
    settings |= {"optim": JointAdam(lr=0.02), "callbacks": [LRSchedule("cosine")]}
    history = fit(model, guide, Y, loss=MeanFieldELBO(max_plate_nesting=1), **settings)
    np.testing.assert_allclose(gplvm.history_.losses, history.losses, rtol=1e-3)
    np.testing.assert_allclose(gplvm.embedding_, guide.median()["X"], atol=0.02)
    assert gplvm.n_iter_ == 100


def test_latents_tell_the_kinds_of_flowers_and_the_data(iris):
    gplvm = GPLVM(random_state=0, max_iter=150, learning_rate=0.1).fit(iris)
    again = gplvm.transform(iris)
    assert np.median(np.abs(again - gplvm.embedding_)) < 0.1
    for latents in (again, gplvm.embedding_):
        assert np.square(gplvm.inverse_transform(latents) - iris).mean() < 0.05 * iris.var(0).mean()
    pipeline = make_pipeline(GPLVM(random_state=0, max_iter=75, learning_rate=0.1), KNeighborsClassifier(1))
    assert cross_val_score(pipeline, iris, load_iris().target, cv=3).mean() > 0.85


def test_missing_entries_are_filled(iris):
    hidden = np.random.default_rng(0).random(iris.shape) < 0.2
    hidden[:, 3] &= ~hidden[:, :3].all(1)  # of each row something is seen
    seen = np.where(hidden, np.nan, iris)
    gplvm = GPLVM(random_state=0, max_iter=150, learning_rate=0.1).fit(seen)
    filled = gplvm.inverse_transform(gplvm.transform(seen))
    errors = (filled - iris)[hidden], (np.nanmean(seen, 0) - iris)[hidden]
    assert np.square(errors[0]).mean() < 0.25 * np.square(errors[1]).mean()


def test_other_likelihoods_see_the_data_as_they_are():
    X = (np.random.default_rng(0).random((40, 6)) < 0.4).astype(np.float64)
    likelihood = Bernoulli()
    gplvm = GPLVM(likelihood=likelihood, max_iter=20, random_state=0).fit(X)
    assert isinstance(gplvm.model_.likelihood, Bernoulli)
    assert gplvm.model_.likelihood is not likelihood
    probabilities = gplvm.inverse_transform(gplvm.transform(X))
    assert ((probabilities > 0.0) & (probabilities < 1.0)).all()


def test_rows_do_not_depend_on_those_beside_them(iris):
    gplvm = GPLVM(random_state=0, max_iter=30).fit(iris)
    many = np.tile(iris, (8, 1))  # in two parts
    assert np.abs(gplvm.transform(many)[-150:] - gplvm.transform(iris)).mean() < 1e-3


def test_a_fit_repeats_and_goes_by_pickle(iris):
    first, second, other = (GPLVM(random_state=seed, max_iter=20).fit(iris) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.transform(iris), second.transform(iris))
    assert not np.array_equal(first.embedding_, other.embedding_)
    copy = pickle.loads(pickle.dumps(first))
    np.testing.assert_array_equal(copy.transform(iris), first.transform(iris))
    np.testing.assert_array_equal(copy.inverse_transform(first.embedding_), first.inverse_transform(first.embedding_))
    assert list(copy.get_feature_names_out()) == ["gplvm0", "gplvm1"]


def test_gradients_may_be_off_around_it(iris):
    expected = GPLVM(max_iter=5, random_state=0).fit_transform(iris)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            np.testing.assert_array_equal(GPLVM(max_iter=5, random_state=0).fit_transform(iris), expected)


def test_columns_without_data_are_refused(iris):
    with pytest.raises(ValueError, match=r"an observed entry in every column of X, got 1 column"):
        GPLVM(max_iter=2).fit(np.where(np.arange(4) == 2, np.nan, iris))


def test_sizes_are_checked_when_it_is_fitted(iris):
    for name in ("n_components", "n_inducing", "max_iter"):
        with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
            GPLVM(**{name: 0}).fit(iris)


@pytest.mark.parametrize("when", [False, True], ids=["fitted before", "fitted after"])
def test_serves_whether_parameters_are_local_to_modules_or_not(iris, when):
    with pyro.settings.context(module_local_params=when):
        gplvm = GPLVM(max_iter=5, n_inducing=6, random_state=0).fit(iris)
        expected = gplvm.transform(iris[:3])
    with pyro.settings.context(module_local_params=not when):
        for each in (gplvm, pickle.loads(pickle.dumps(gplvm))):
            np.testing.assert_array_equal(each.transform(iris[:3]), expected)
            assert each.inverse_transform(expected).shape == (3, 4)
