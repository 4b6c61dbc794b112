"""Initial values of latents and parameters."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import NegativeBinomial
from pyro_lvgp.models import BayesianGPLVM
from tests.models.gplvm._models import D, M, Q, make_model

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("of", ["kernel", "likelihood"])
def test_initial_values_under_priors_are_those_of_the_seed(of):
    Y = torch.poisson(torch.full((20, D), 3.0))

    def start(state):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = BayesianGPLVM(20, D, 2, num_inducing=5, likelihood=NegativeBinomial())
        if of == "kernel":
            model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        else:
            model.likelihood.dispersion = PyroSample(dist.LogNormal(1.0, 1.0))
        torch.manual_seed(state)
        model.initialize(Y, seed=0)
        return model.mean, model.initial_values["u"]

    for one, other in zip(start(1), start(2), strict=True):
        assert torch.equal(one, other)


def test_initialize_reconstructs_like_pca_and_guides_start_there():
    X = torch.randn(60, 2)
    Y = X @ torch.randn(2, 6) + 0.05 * torch.randn(60, 6) + 3.0
    Y[torch.rand(Y.shape) < 0.1] = torch.nan
    for method in ("pca", "factor-analysis"):
        pyro.clear_param_store()
        model = BayesianGPLVM(60, 6, 2, RBF(2, lengthscale=3.0), num_inducing=20).initialize(Y, method=method)
        guide = MeanFieldGuide(model)
        error = (model.reconstruct(guide, Y, num_samples=4).mean - Y).square().nanmean()
        assert error < 0.05 * Y[~torch.isnan(Y)].var()


def test_inducing_points_with_a_prior_keep_it_and_held_ones_their_places(Y):
    model = make_model()
    model.inducing_points = PyroSample(dist.Normal(torch.zeros(M, Q), 1.0).to_event(2))
    guide = MeanFieldGuide(model.initialize(Y))
    guide(Y)
    pyro.clear_param_store()
    torch.testing.assert_close(guide.median()["inducing_points"], make_model().initialize(Y).inducing_points)
    model = make_model()
    model.inducing_points_unconstrained.requires_grad_(False)
    before = model.inducing_points.clone()
    assert torch.equal(model.initialize(Y).inducing_points, before)
