"""Arguments that would give wrong numbers without an error."""

import math

import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, JointOptim, MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Gaussian, LogNormal, NegativeBinomial, StudentT
from pyro_lvgp.models import BayesianGPLVM

Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def make():
    model = BayesianGPLVM(12, 3, latent_dim=2, num_inducing=4)
    return model, MeanFieldGuide(model)


@pytest.mark.parametrize("ridge", [-1.0, math.inf, math.nan])
def test_ridges(ridge):
    with pytest.raises(ValueError, match="expected a ridge of 0 or more"):
        make()[0].initialize(Y, ridge=ridge)


@pytest.mark.parametrize("clip_norm", [-1.0, 0.0, math.nan])
def test_norms_of_gradients(clip_norm):
    with pytest.raises(ValueError, match="expected a positive clip_norm"):
        JointOptim(clip_norm=clip_norm)


def test_columns_named_twice():
    with pytest.raises(ValueError, match=r"active_dims that differ, got \[0, 0\]"):
        RBF(2, active_dims=[0, 0])


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("make_part", [lambda x: RBF(1, lengthscale=x), lambda x: Matern(1, 1.5, variance=torch.tensor(x))])
def test_parameters_of_kernels(make_part, value):
    with pytest.raises(ValueError, match=r"expected finite .* > 0"):
        make_part(value)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("make_part", [Gaussian, LogNormal, StudentT, NegativeBinomial])
def test_parameters_of_likelihoods(make_part, value):
    with pytest.raises(ValueError, match="expected a positive"):
        make_part(value)


@pytest.mark.parametrize("seed", [1.5, True, "1"])
@pytest.mark.usefixtures("unchecked")
def test_seeds(seed):
    with pytest.raises(TypeError, match="expected seed to be an integer or None"):
        fit(*make(), Y, seed=seed, num_steps=1, progress=False)


@pytest.mark.usefixtures("unchecked")
def test_truth_values_are_no_numbers():
    with pytest.raises(TypeError, match="expected num_samples to be an integer, got True"):
        MeanFieldELBO(num_samples=True)
    with pytest.raises(TypeError, match="expected num_steps to be an integer, got True"):
        fit(*make(), Y, num_steps=True, progress=False)
    with pytest.raises(ValueError, match="init_scale"):
        MeanFieldGuide(make()[0], init_scale=True)
    with pytest.raises(ValueError, match="finite lengthscale > 0, got True"):
        RBF(1, lengthscale=True)
    with pytest.raises(TypeError, match="expected a number as variance"):
        Gaussian(True)


@pytest.mark.parametrize("bound", [MeanFieldELBO, ImportanceWeightedELBO])
def test_names_of_plates(bound):
    model, guide = make()
    with pytest.raises(ValueError, match="rows"):
        bound("rows").loss(model, guide, Y)
    with pytest.raises(ValueError, match=r"one of \['data', 'outputs'\], got local_plate='rows'"):
        MeanFieldELBO("rows").loss(model, guide, Y)
