"""Files of fitted transformers."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_array_equal
from sklearn.exceptions import NotFittedError

from pyro_lvgp import save
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import RowArguments
from pyro_lvgp.sklearn import GPLVM, RandomFeatureGPLVM

SIZES = {"max_iter": 4, "random_state": 0}
ESTIMATORS = {
    "standardised": GPLVM(n_inducing=5, **SIZES),
    "likelihood by name": RandomFeatureGPLVM(likelihood="negative_binomial", n_frequencies=5, **SIZES),
    "likelihood, dimensions by relevance": GPLVM("auto", likelihood=Poisson(), n_inducing=5, **SIZES),
}


@pytest.fixture(scope="module")
def counts():
    Y = np.random.default_rng(0).poisson(3.0, (20, 3)).astype(float)
    Y[0, 1] = np.nan
    return pd.DataFrame(Y, columns=list("abc"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fitted.safetensors"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_loaded_estimators_predict_the_same(name, counts, path):
    fitted = ESTIMATORS[name].fit(counts)
    fitted.save(path)
    loaded = type(fitted).load(path)
    assert str(loaded.get_params()) == str(fitted.get_params())
    assert_array_equal(loaded.transform(counts), fitted.transform(counts))
    moments = [each.inverse_transform(fitted.embedding_[:2], return_std=True) for each in (loaded, fitted)]
    assert_array_equal(*moments)
    if isinstance(fitted, GPLVM):
        assert_array_equal(loaded.score_samples(counts), fitted.score_samples(counts))
    assert_array_equal(loaded.embedding_, fitted.embedding_)
    assert loaded.history_ == fitted.history_
    assert loaded.n_iter_ == fitted.n_iter_
    assert_array_equal(loaded.get_feature_names_out(), fitted.get_feature_names_out())
    with pytest.raises(ValueError, match="feature names"):
        loaded.transform(counts[["c", "b", "a"]])


def test_fits_of_loaded_estimators_continue(counts, path):
    GPLVM(n_inducing=5, **SIZES).fit(counts).save(path)
    loaded = GPLVM.load(path).set_params(warm_start=True)
    bound, model = loaded.history_.bounds_per_entry[-1], loaded.model_
    loaded.set_params(max_iter=50).fit(counts)
    assert loaded.model_ is model
    assert loaded.history_.bounds_per_entry[-10:].mean() > bound
    loaded.save(path)
    assert_array_equal(GPLVM.load(path).embedding_, loaded.embedding_)


def test_known_quantities_of_rows(counts, path):
    rows = RowArguments(covariates=torch.arange(20.0)[:, None])
    fitted = GPLVM(n_inducing=5, **SIZES).fit(counts, rows=rows)
    fitted.save(path)
    assert_array_equal(GPLVM.load(path).transform(counts, rows), fitted.transform(counts, rows))


def test_what_a_file_cannot_hold(counts, path):
    with pytest.raises(NotFittedError):
        GPLVM().save(path)
    fitted = GPLVM(n_inducing=5, **SIZES).fit(counts)
    with pytest.raises(ValueError, match="copied or unpickled BayesianGPLVM"):
        pickle.loads(pickle.dumps(fitted)).save(path)
    fitted.set_params(device=torch.device("cpu")).save(path)
    assert GPLVM.load(path).device == "cpu"
    path.unlink()
    with pytest.raises(TypeError, match=r"expected an integer or None as random_state .* got a RandomState"):
        fitted.set_params(random_state=np.random.RandomState(0)).save(path)
    assert not path.exists()
    fitted.set_params(random_state=0).save(path)
    with pytest.raises(ValueError, match=r"expected a file of RandomFeatureGPLVM.save, .* of GPLVM; use GPLVM.load"):
        RandomFeatureGPLVM.load(path)
    save(path, ESTIMATORS["standardised"].fit(counts).model_)
    with pytest.raises(ValueError, match=r"of a model; use pyro_lvgp\.load"):
        GPLVM.load(path)
