"""Variational parameters of logistic likelihoods."""

import math

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import BlockCoordinateVI
from pyro_lvgp.kernels import random_features
from pyro_lvgp.likelihoods import Bernoulli, NegativeBinomial
from pyro_lvgp.likelihoods import polya_gamma as polyagamma
from pyro_lvgp.models import RandomFeatureLVM
from tests.guides.random_feature._models import settle
from tests.helpers.random_features import D, N, features_of, make_pair

pytestmark = pytest.mark.usefixtures("float64")


def test_touching_points_start_where_the_data_are():
    """Counts without overdispersion have an r far above their mean, which is then far out on the logit scale."""
    counts = torch.poisson(torch.full((40, 5), 3.0))
    model = RandomFeatureLVM(40, 5, 2, num_frequencies=8, likelihood=NegativeBinomial()).initialize(counts)
    guide = RandomFeatureGuide(model)
    guide(counts)
    assert model.likelihood.dispersion.item() == pytest.approx(30.0 * counts.mean().item())
    torch.testing.assert_close(guide.a.c.detach(), (model.likelihood.inverse_link(counts).square() + 1.0).sqrt().detach())
    BlockCoordinateVI(model, guide, guide.blocks()).step(counts)
    mean = model.reconstruct(guide, counts, num_samples=4).mean
    assert (mean.mean() - counts.mean()).abs() < 0.5


@pytest.mark.parametrize("start", [0.25, 4.0])
def test_a_dispersion_is_found_again(start):
    """The counts of 20 functions of a line, with r = 1: 3000 of them tell r to some 5 %."""
    functions = random_features(torch.randn(150, 1), torch.randn(8, 1) / (2 * math.pi)) @ torch.randn(16, 20)
    counts = dist.NegativeBinomial(1.0, logits=functions + 1.0).sample()
    model = RandomFeatureLVM(150, 20, 1, num_frequencies=8, num_components=2, likelihood=NegativeBinomial())
    model.initialize(counts).likelihood.dispersion = torch.tensor(start)
    guide = RandomFeatureGuide(model)
    vi = BlockCoordinateVI(model, guide, guide.blocks(lr=0.05))
    for _ in range(150):
        vi.step(counts)
    assert 0.85 < model.likelihood.dispersion < 1.15


def test_touching_points_settle_where_the_bound_is_flat():
    Y = Bernoulli()(torch.randn(N, D)).sample()
    model, guide = make_pair(Y, Bernoulli(), frequencies="gaussian")
    model.mean = torch.zeros(D)
    settle(guide, Y)
    c = guide.a.c.detach().requires_grad_()
    form = polyagamma.binomial(Y, torch.ones(()))
    (slope,) = torch.autograd.grad(polyagamma.collapsed_log_bound(features_of(model, guide), form, c).sum(), c)
    torch.testing.assert_close(slope, torch.zeros(N, D), rtol=0.0, atol=1e-7)
