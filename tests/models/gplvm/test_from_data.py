"""Sizes and initial values from the data, and the prior of new rows' latents from the training latents."""

import numpy as np
import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, LowRankGaussian
from pyro_lvgp.models import BayesianGPLVM, MultiViewGPLVM, RandomFeatureLVM
from pyro_lvgp.models.initialization import kaiser_dim

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def Y():
    return torch.randn(60, 3) @ torch.randn(3, 12) + 0.1 * torch.randn(60, 12)


def test_the_latent_dimension_is_the_number_of_eigenvalues_above_one(Y):
    expected = int((np.linalg.eigvalsh(np.corrcoef(Y.numpy().T)) > 1.0).sum())
    assert kaiser_dim(Y, most=12) == expected
    assert kaiser_dim(Y, most=2) == 2
    assert BayesianGPLVM.from_data(Y).latent_dim == expected
    constant = torch.cat([Y, torch.ones(60, 1)], 1)
    constant[::7, 0] = torch.nan
    assert kaiser_dim(constant, most=12) == expected


def test_is_the_initialized_model_of_these_sizes(Y):
    model = BayesianGPLVM.from_data(Y.float(), seed=3)
    assert isinstance(model.likelihood, LowRankGaussian)
    assert (model.num_data, model.data_dim, model.num_inducing, model.likelihood.rank) == (60, 12, 30, 4)
    sizes = {"num_inducing": 30, "likelihood": LowRankGaussian(4, 12)}
    expected = BayesianGPLVM(60, 12, 3, **sizes).float().initialize(Y.float(), seed=3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])
    assert torch.equal(model.initial_values["X"], expected.initial_values["X"])
    assert BayesianGPLVM.from_data(Y[:10]).num_inducing == 10
    assert isinstance(BayesianGPLVM.from_data((Y > 0.0).double(), likelihood=Bernoulli()).likelihood, Bernoulli)


@pytest.mark.parametrize(
    "make", [BayesianGPLVM.from_data, RandomFeatureLVM.from_data, lambda Y: MultiViewGPLVM.from_data({"a": Y})]
)
def test_data_of_another_scale_have_a_warning(Y, make):
    for factor in (0.01, 100.0):
        with pytest.warns(UserWarning, match=r"expected columns.* of about unit variance, .*; standardise them"):
            make(factor * Y)


def test_scales_that_the_user_chose_have_no_warning(Y):
    BayesianGPLVM.from_data(100.0 * Y, 2, likelihood=Gaussian(300.0))
    BayesianGPLVM.from_data(100.0 * Y, 2, RBF(2, variance=1e4))
    MultiViewGPLVM.from_data({"a": 100.0 * Y}, 2, {"a": RBF(2, variance=1e4)})


@pytest.mark.usefixtures("unchecked")
def test_data_and_sizes_that_do_not_fit_are_refused(Y):
    with pytest.raises(ValueError, match=r"expected data of shape \[rows, columns\], got \[60\]"):
        BayesianGPLVM.from_data(Y[:, 0])
    with pytest.raises(ValueError, match="an observed entry in every column"):
        BayesianGPLVM.from_data(Y.masked_fill(torch.arange(12) == 2, torch.nan))
    with pytest.raises(ValueError, match="expected a rank for the default likelihood alone, got rank=2"):
        BayesianGPLVM.from_data(Y, rank=2, likelihood=Gaussian())


def test_the_training_prior_has_the_moments_of_the_training_latents(Y):
    model = BayesianGPLVM.from_data(Y, 2)
    guide = MeanFieldGuide(model, init_scale=0.01)
    guide(Y)
    with torch.no_grad():
        guide.locs.X = 3.0 + 2.0 * torch.randn(60, 2)
    prior = model.training_prior(guide, Y)
    torch.testing.assert_close(prior.mean, guide.locs.X.detach().mean(0), rtol=0.02, atol=0.0)
    torch.testing.assert_close(prior.variance, guide.locs.X.detach().var(0, correction=0), rtol=0.02, atol=0.0)
    with pytest.raises(ValueError, match="expected training rows, got 60 rows"):
        model.training_prior(guide, Y + 1.0)
