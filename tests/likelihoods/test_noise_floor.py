"""Noise of each output is bounded relative to its column, so that exactly reproducible columns do not take over a fit."""

import copy

import pytest
import torch

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Heterogeneous, LogNormal, StudentT
from pyro_lvgp.models import BayesianGPLVM

N, D = 30, 4


def make_data():
    x = torch.linspace(-2.0, 2.0, N, dtype=torch.float64)[:, None]
    Y = torch.cat([x, x.sin(), x.cos(), torch.full_like(x, 3.0)], -1)
    Y[:, :3] += 0.1 * torch.randn(N, 3, dtype=torch.float64)
    return Y


def test_constant_columns_are_named_and_their_noise_is_bounded(float64):
    Y = make_data()
    model = BayesianGPLVM(N, D, latent_dim=1, num_inducing=6, likelihood=Gaussian(0.1, data_dim=D))
    with pytest.warns(RuntimeWarning, match=r"columns \[3\] of the data are constant"):
        model.initialize(Y)
    floor = 1e-4 * Y.var(0, correction=0).mean()
    torch.testing.assert_close(model.likelihood.noise_floor[3], floor)
    with torch.no_grad():
        model.likelihood.variance = torch.tensor([0.1, 0.1, 0.1, 1e-20])
    torch.testing.assert_close(model.likelihood.params(), torch.tensor([0.1, 0.1, 0.1, floor.item()]))
    guide = MeanFieldGuide(model)
    with pytest.warns(RuntimeWarning, match="constant"):
        history = fit(model, guide, Y, loss=MeanFieldELBO(), optim=JointAdam(lr=0.05), num_steps=40, progress=False)
    largest = -0.5 * N * (2.0 * torch.pi * model.likelihood.params()).log().sum()
    assert -min(history.losses) < largest


@pytest.mark.parametrize("make", [Gaussian, StudentT, LogNormal])
def test_floors_are_relative_to_the_columns(make, dtype):
    y = (torch.randn(50, 2, dtype=dtype) * torch.tensor([1e-3, 1e3], dtype=dtype)).abs() + 1.0
    likelihood = make(1e-30, data_dim=2).to(dtype)
    likelihood.bound_noise(y)
    values = y.log() if make is LogNormal else y
    floor = 1e-8 * values.var(0, correction=0)
    torch.testing.assert_close(likelihood.params(), floor.sqrt() if make is StudentT else floor, rtol=1e-4, atol=0.0)
    assert not list(likelihood.state_dict().keys() - {"variance_unconstrained", "scale_unconstrained"})
    torch.testing.assert_close(copy.deepcopy(likelihood).params(), likelihood.params())


@pytest.mark.parametrize("make", [Gaussian, StudentT, LogNormal])
def test_usual_noise_is_as_it_was(make):
    y = torch.randn(50, 2).abs() + 1.0
    for likelihood in (make(0.01, data_dim=2), make(1e-12)):  # one for each column, and one shared
        before = likelihood.params().clone()
        likelihood.bound_noise(y)
        assert torch.equal(likelihood.params(), before)


def test_parts_of_a_heterogeneous_likelihood():
    kinds = Heterogeneous([(Gaussian(1e-20, data_dim=1), [1]), (Bernoulli(), [0])])
    kinds.bound_noise(torch.stack([torch.ones(10), torch.arange(10.0)], -1))
    torch.testing.assert_close(kinds.params()[..., 1], torch.tensor(8.25e-8))
    with pytest.warns(RuntimeWarning, match=r"columns \[1\]"):
        kinds.bound_noise(torch.ones(10, 2))
