"""Fixtures of the tests of this folder."""

import matplotlib
import pytest
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA


@pytest.fixture(autouse=True)
def _agg():
    before = dict(matplotlib.rcParams)
    plt.switch_backend("agg")
    yield
    plt.close("all")
    assert {k: v for k, v in matplotlib.rcParams.items() if k != "backend"} == {
        k: v for k, v in before.items() if k != "backend"
    }


@pytest.fixture(scope="module")
def digits():
    Y, labels = load_digits(return_X_y=True)
    pca = PCA(4, random_state=0).fit(Y)
    Z = pca.transform(Y)
    return Y, labels, Z / Z.std(0), pca.inverse_transform(Z)
