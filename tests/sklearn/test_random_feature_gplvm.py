"""The random-feature transformer against the model that it wraps."""

import numpy as np
import pyro
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.manifold import TSNE
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.likelihoods import Bernoulli, NegativeBinomial
from pyro_lvgp.models import RandomFeatureLVM
from pyro_lvgp.sklearn import RandomFeatureGPLVM


@pytest.fixture
def iris():
    return load_iris().data.astype(np.float32)


def test_it_is_the_model_from_t_sne_under_a_guide_with_gaussian_frequencies(iris):
    """And leaves Pyro's parameters and the global random state alone."""
    pyro.param("mine", torch.ones(()))
    state = torch.get_rng_state()
    fitted = RandomFeatureGPLVM(n_frequencies=20, max_iter=20, random_state=3).fit(iris)
    assert list(pyro.get_param_store()) == ["mine"]
    assert torch.equal(torch.get_rng_state(), state)
    Y, seed = torch.tensor(fitted.scaler_.transform(iris)), int(np.random.RandomState(3).randint(2**31 - 1))
    layout = torch.tensor(TSNE(2, random_state=seed).fit_transform(Y.numpy()))
    model = RandomFeatureLVM(150, 4, 2, num_frequencies=20, lengthscale=0.5, seed=seed).initialize(Y, latents=layout)
    guide = RandomFeatureGuide(model, frequencies="gaussian", seed=seed)
    history = fit(model, guide, Y, optim=guide.blocks(), num_steps=20, seed=seed, progress=False)
    np.testing.assert_allclose(fitted.history_.losses, history.losses, rtol=1e-4)
    accuracy = cross_val_score(KNeighborsClassifier(1), fitted.embedding_, load_iris().target, cv=3).mean()
    assert accuracy > 0.9
    assert np.square(fitted.inverse_transform(fitted.embedding_) - iris).mean() < 0.1 * iris.var(0).mean()
    assert np.median(np.abs(fitted.transform(iris) - fitted.embedding_)) < 0.2


@pytest.mark.parametrize(("likelihood", "weights"), [(Bernoulli(), "collapsed"), (NegativeBinomial(data_dim=6), "collapsed")])
def test_other_likelihoods_see_the_data_as_they_are(likelihood, weights):
    X = (np.random.default_rng(0).random((40, 6)) < 0.4).astype(np.float64)
    fitted = RandomFeatureGPLVM(likelihood=likelihood, n_frequencies=5, max_iter=5, random_state=0).fit(X)
    assert fitted.guide_.weights == weights
    means = fitted.inverse_transform(fitted.transform(X))
    assert (means > 0.0).all()


def test_gaussian_data_with_gaps_share_one_factor(iris):
    gapped = np.where(np.random.default_rng(0).random(iris.shape) < 0.1, np.nan, iris)
    assert RandomFeatureGPLVM(n_frequencies=5, max_iter=2, random_state=0).fit(gapped).guide_.weights == "filled"


def test_frozen_at_a_layout_it_is_the_model_from_data(iris):
    settings = {"layout": "tsne", "n_frequencies": 10, "max_iter": 5, "random_state": 3}
    fitted = RandomFeatureGPLVM(freeze_latents=True, **settings).fit(iris)
    Y, seed = torch.tensor(fitted.scaler_.transform(iris)), int(np.random.RandomState(3).randint(2**31 - 1))
    model = RandomFeatureLVM.from_data(Y, 2, layout="tsne", num_frequencies=10, seed=seed)
    np.testing.assert_array_equal(fitted.embedding_, model.initial_values["X"])
    guide = RandomFeatureGuide(model, frequencies="gaussian", freeze_latents=True, seed=seed)
    history = fit(model, guide, Y, optim=guide.blocks(), num_steps=5, seed=seed, progress=False)
    np.testing.assert_allclose(fitted.history_.losses, history.losses, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", [{"layout": "umap"}, {"layout": "tsne", "init": "pca"}])
def test_another_layout_or_a_second_start_is_refused(iris, wrong):
    with pytest.raises(ValueError, match='expected layout="tsne" with init="auto", or layout=None, got layout='):
        RandomFeatureGPLVM(**wrong).fit(iris)
