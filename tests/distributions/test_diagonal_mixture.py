"""Mixtures of diagonal Gaussians: density, gradients and divergence."""

import pytest
import torch
from torch.distributions import kl_divergence

from pyro_lvgp.distributions import DiagonalMixture
from pyro_lvgp.distributions.diagonal_mixture import assignment_logits
from tests.helpers.mixtures import assert_moments_agree, make_mixture

pytestmark = pytest.mark.usefixtures("float64")


def test_mixture_log_prob_and_moments():
    mixture = make_mixture(3, 2, 4)
    value = torch.randn(4, 2)
    slow = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=mixture.logits),
        torch.distributions.Independent(torch.distributions.Normal(mixture.locs, mixture.scales), 1),
    )
    torch.testing.assert_close(mixture.log_prob(value), slow.log_prob(value))
    torch.testing.assert_close(mixture.mean, slow.mean)
    torch.testing.assert_close(mixture.variance, slow.variance)
    draws = mixture.sample((20_000,))
    assert draws.shape == (20_000, 4, 2)
    assert_moments_agree(draws, mixture.mean)
    assert_moments_agree((draws - mixture.mean).square(), mixture.variance)
    assert mixture.expand((5, 4)).sample().shape == (5, 4, 2)


@pytest.mark.parametrize("Q", [1, 2, 3])
def test_pathwise_gradients_of_a_mixture(Q):
    """Against moments in closed form, by many draws from one set of weights for each."""
    logits, locs, log_scales = 0.5 * torch.randn(3), torch.randn(3, Q), 0.3 * torch.randn(3, Q)
    num = 40_000
    parameters = [x.expand(num, *x.shape).clone().requires_grad_() for x in (logits, locs, log_scales)]
    z = DiagonalMixture(parameters[0], parameters[1], parameters[2].exp()).rsample()
    gradients = torch.autograd.grad((z.square().sum(-1) + z.prod(-1)).sum(), parameters)
    exact = [x.clone().requires_grad_() for x in (logits, locs, log_scales)]
    weights, scales = exact[0].softmax(-1), exact[2].exp()
    product = exact[1].prod(-1) if Q > 1 else exact[1][:, 0]
    moment = (weights * ((exact[1].square() + scales.square()).sum(-1) + product)).sum()
    for draws, value in zip(gradients, torch.autograd.grad(moment, exact), strict=True):
        assert_moments_agree(draws, value)


def test_gradients_are_finite_where_components_coincide():
    logits, locs = torch.zeros(3, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    z = DiagonalMixture(logits, locs, torch.ones(3, 2)).rsample((100,))
    for gradient in torch.autograd.grad(z.square().sum(), [logits, locs]):
        assert gradient.isfinite().all()


def test_divergence_of_mixtures_is_that_of_points_and_their_components():
    q = make_mixture()
    p = DiagonalMixture(torch.randn(3), torch.randn(3, 2), 0.3 + torch.rand(3, 2))
    value = kl_divergence(q, p)
    which = torch.distributions.Categorical(logits=q.logits).sample((50_000,))
    z = q.locs[which] + q.scales[which] * torch.randn(50_000, 2)
    joint = [m.logits[which] + m._components().log_prob(z[:, None])[torch.arange(50_000), which].sum(-1) for m in (q, p)]
    assert_moments_agree(joint[0] - joint[1], value)
    draws = q.sample((50_000,))
    assert (q.log_prob(draws) - p.log_prob(draws)).mean() < value
    # With the components of the prior, only the weights differ.
    same = DiagonalMixture(p.logits, q.locs, q.scales)
    categorical = kl_divergence(*(torch.distributions.Categorical(logits=m.logits) for m in (q, same)))
    torch.testing.assert_close(kl_divergence(q, same), categorical)


def test_divergence_of_a_gaussian_is_the_least_over_its_component():
    p, loc, scale = make_mixture(), torch.randn(4, 2), 0.5 + torch.rand(4, 2)
    q = torch.distributions.Independent(torch.distributions.Normal(loc, scale), 1)
    value = kl_divergence(q, p)
    best = assignment_logits(loc, scale, p).softmax(-1)
    one_by_one = kl_divergence(torch.distributions.Normal(loc[:, None], scale[:, None]), p._components()).sum(-1)

    def augmented(phi):
        return (phi * (phi.log() - p.logits + one_by_one)).sum(-1)

    torch.testing.assert_close(value, augmented(best))
    assert (value < augmented(torch.rand(4, 3).softmax(-1))).all()
    draws = q.sample((20_000,))
    assert ((q.log_prob(draws) - p.log_prob(draws)).mean(0) < value).all()
