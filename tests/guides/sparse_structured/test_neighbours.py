"""Sites on f told to the nearest inducing points."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_lvgp.guides import SparseStructuredGPGuide
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import SparseGPVAE
from pyro_lvgp.networks import FactorNet, NeighbourNet
from tests.helpers.sparse_processes import D, Q, assert_close, data, function, make, stirred, told_to_points

pytestmark = pytest.mark.usefixtures("float64")


def test_neighbours_are_told_the_same_at_first():
    """T points share what a datum knows."""
    net = NeighbourNet(FactorNet(D, Q), input_dim=1, latent_dim=Q)
    y = torch.randn(5, D)
    y[1] = torch.nan
    loc, scale = net.encoder(y)
    told_loc, told_scale = net(y, torch.randn(5, 3, 1))
    assert_close((told_loc, told_scale), (loc[:, None].expand(5, 3, Q), 3**0.5 * scale[:, None].expand(5, 3, Q)))
    with pytest.raises(ValueError, match=rf"expected an encoder of latent_dim=1 processes, got one of {Q}"):
        NeighbourNet(FactorNet(D, Q), input_dim=1, latent_dim=1)(y, torch.randn(5, 3, 1))


@pytest.mark.parametrize("form", ["nearest", "neighbours"])
def test_what_nothing_is_known_of_does_not_drown_what_is(form):
    """A latent without data has a scale of 1e61 in float64, whose logarithm dwarfs all else that a network is told."""
    net, told = told_to_points(form, FactorNet(D, D, loadings=torch.eye(D)), D, num_nearest=3), []
    net.net.register_forward_pre_hook(lambda module, args: told.append(args[0]))
    y = torch.randn(5, D)
    y[:, 0] = torch.nan
    assert (net.encoder(y)[1][:, 0] > 1e60).all()
    net(y, torch.randn(5, 3, 1))
    loc, known = told[0][..., 1:].split(D, -1)
    assert loc[..., 0].abs().max() < 1e-12
    assert known[..., 0].abs().max() < 1e-12
    assert (known[..., 1:] > 0.0).all()


def test_one_neighbour_at_each_datum_is_the_projected_form():
    """Where the network says nothing yet."""
    x, y = data()
    model, projected = make("projected", x, jitter=1e-10)
    net = NeighbourNet(projected.encoders.u, input_dim=1, latent_dim=Q, num_nearest=1)
    neighbours = SparseStructuredGPGuide(model, encoders={"u": net})
    assert_close(function(neighbours, x, y), function(projected, x, y), atol=1e-6)


def test_neighbours_against_quadrature_of_both_integrals():
    """One datum told to two points: p(u) ∏ₘ ∫ N(f; μₘ, vₘ) p(f | uₘ) df on a grid, with a network that has its say."""
    x, y = torch.tensor([[0.3]]), torch.randn(1, D)
    Z = torch.tensor([[0.1], [0.6]])
    model = SparseGPVAE(RBF(1, variance=1.3, lengthscale=0.4, batch_shape=(1,)), nn.Linear(1, D), Z)
    net = stirred(NeighbourNet(FactorNet(D, 1), input_dim=1, latent_dim=1, num_nearest=2))
    guide = SparseStructuredGPGuide(model, encoders={"u": net})
    got_mean, got_scale = function(guide, x, y)
    with torch.no_grad():
        K = model.kernel(torch.cat([Z, x]))[0]
        grid = torch.linspace(-7.0, 7.0, 400)
        step = grid[1] - grid[0]
        u = torch.cartesian_prod(grid, grid)
        log_q = dist.MultivariateNormal(torch.zeros(2), K[:2, :2]).log_prob(u).reshape(400, 400)
        loc, scale = net(y, (Z - x)[None])
        for m in range(2):
            conditional = dist.Normal(K[m, 2] / K[m, m] * grid, (K[2, 2] - K[m, 2] ** 2 / K[m, m]).sqrt())
            site = dist.Normal(loc[0, m], scale[0, m]).log_prob(grid)
            told = (conditional.log_prob(grid[:, None]) + site[:, None]).logsumexp(0) + step.log()
            log_q = log_q + (told[:, None] if m == 0 else told)
        q = log_q.flatten().softmax(0)
        gain = torch.linalg.solve(K[:2, :2], K[:2, 2])
        f = u @ gain
        mean = (q * f).sum()
        variance = (q * f.square()).sum() - mean**2 + K[2, 2] - gain @ K[:2, 2]
    assert_close((got_mean.squeeze(), got_scale.squeeze().square()), (mean, variance), atol=1e-4)
