"""Gaussians given by their precision."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from torch.profiler import ProfilerActivity, profile

from pyro_lvgp.distributions import PrecisionNormal, PrecisionNormalAtMean
from tests.helpers.mixtures import assert_moments_agree

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("shared", [False, True])
def test_precision_normal_is_the_gaussian(shared):
    A = torch.randn(1 if shared else 3, 4, 4)
    P = A @ A.mT + torch.eye(4)
    loc = torch.randn(3, 4)
    ours = PrecisionNormal(loc, torch.linalg.cholesky(P))
    theirs = MultivariateNormal(loc, precision_matrix=P)
    value = torch.randn(2, 3, 4)
    torch.testing.assert_close(ours.log_prob(value), theirs.log_prob(value))
    torch.testing.assert_close(ours.variance, theirs.variance)
    draws = ours.sample((20_000,))
    assert draws.shape == (20_000, 3, 4)
    white = (torch.linalg.cholesky(P).mT @ (draws - loc)[..., None]).squeeze(-1)
    assert_moments_agree(white, torch.zeros(3, 4))
    assert_moments_agree(white[..., :, None] * white[..., None, :], torch.eye(4))
    with pytest.raises(NotImplementedError):
        kl_divergence(ours, theirs)
    assert ours.expand((2, 3)).log_prob(value).shape == (2, 3)


@pytest.mark.parametrize("shared", [False, True])
def test_at_its_mean_a_density_has_all_gradients_but_that_of_the_mean(shared):
    A = torch.randn(1 if shared else 3, 4, 4)
    R = torch.linalg.cholesky(A @ A.mT + torch.eye(4)).requires_grad_()
    loc = torch.randn(3, 4, requires_grad=True)
    q, slow = PrecisionNormalAtMean(loc, R), PrecisionNormal(loc, R)
    value = q.rsample()
    assert torch.equal(value, loc)
    assert not value.requires_grad
    assert torch.equal(q.rsample((2,)), loc.expand(2, 3, 4))
    torch.testing.assert_close(q.expand((2, 3)).rsample(), loc.detach().expand(2, 3, 4))
    for at in (value, value + 1.0):
        torch.testing.assert_close(q.log_prob(at), slow.log_prob(at))
        ours, theirs = (torch.autograd.grad(p.log_prob(at).sum(), [loc, R], allow_unused=True) for p in (q, slow))
        torch.testing.assert_close(torch.zeros(3, 4) if ours[0] is None else ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])


def test_one_precision_for_a_batch_is_that_of_each_and_never_copied():
    D, L = 50, 20
    loc, R = torch.randn(D, L), torch.linalg.cholesky(torch.eye(L) + 0.1)
    found = []
    for shared in (True, False):
        torch.manual_seed(0)
        mean, tril = loc.clone().requires_grad_(), (R[None] if shared else R.expand(D, L, L)).clone().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as calls:
            q = PrecisionNormal(mean, tril)
            draw = q.rsample()
            value = q.log_prob(loc) - q.log_prob(draw.square())
            value.sum().backward()
        largest = max(math.prod(shape) for event in calls.events() for shape in event.input_shapes if shape)
        assert largest == (L * max(D, L) if shared else D * L * L)
        found.append((draw, value, mean.grad, tril.grad.sum(0)))
    torch.testing.assert_close(found[0], found[1])
