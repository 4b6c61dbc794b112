"""Resampled chains to a narrow Gaussian: the gradient of their estimate."""

import math

import pytest
import torch
from torch.distributions import Normal

from pyro_lvgp.guides.annealed._chain import AnnealedChain
from pyro_lvgp.guides.annealed._resampling import ChainResampling
from pyro_lvgp.guides.annealed.transitions import TRANSITIONS, OverdampedLangevin, UnderdampedLangevin
from pyro_lvgp.ops.resampling import systematic_ancestors

pytestmark = pytest.mark.usefixtures("float64")
BETA, NUM_CHAINS = [0.2, 0.5, 0.8, 1.0], 4


class Target:
    """N(1, 0.3²) in coordinates whitened by the base N(loc, 1)."""

    differentiable = True

    def __init__(self, loc):
        self.loc = loc

    def score(self, z):
        return ((1.0 - self.loc - z[0]) / 0.09,)

    def log_prob(self, z):
        return Normal(1.0, 0.3).log_prob(self.loc + z)

    def log_joint(self, z):
        return self.log_prob(z[0]).sum()

    def log_joint_of_entries(self, z, dims):
        return self.log_prob(z[0]).detach()


def log_estimate(loc, num_data, *, seed, dynamics="overdamped", step_size=0.05, threshold=0.9):
    """Log of the estimate of the evidence, which is 1, of each datum."""
    torch.manual_seed(seed)
    z, target = torch.randn(NUM_CHAINS, num_data), Target(loc)
    transition = {"overdamped": OverdampedLangevin, "underdamped": UnderdampedLangevin}[dynamics](math.inf, math.inf)
    resampling = ChainResampling(threshold, (-2, -1), [0])
    step_size = torch.as_tensor(step_size).expand(4)
    chain = AnnealedChain(target, transition, torch.tensor(BETA), [step_size], torch.tensor(0.7), None, resampling=resampling)
    ends = chain.run((z,))
    log_w = target.log_prob(ends.z[0]) - Normal(0.0, 1.0).log_prob(z) + ends.log_ratio[0]
    return log_w.logsumexp(0) - math.log(NUM_CHAINS)


def test_gradient_is_close_to_that_of_the_expected_estimate():
    values = [log_estimate(torch.tensor(x), 100_000, seed=i) for i, x in enumerate([0.2, -0.2])]
    difference = (values[0].mean() - values[1].mean()) / 0.4
    assert torch.cat(values).std() / 50_000**0.5 / 0.4 < 0.02
    loc = torch.tensor(0.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_estimate(loc, 100_000, seed=2).mean(), loc)
    assert gradient == pytest.approx(difference.item(), abs=0.08)


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_value_and_gradient_are_those_of_the_estimate_written_out(dynamics):
    """A product of mean weights over segments, each from one resampling to the next, of paths of constant ancestors."""
    loc, eta = torch.tensor(0.1, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    num_data, is_underdamped = 50, dynamics == "underdamped"
    found = log_estimate(loc, num_data, seed=3, dynamics=dynamics, step_size=eta, threshold=0.6)

    torch.manual_seed(3)
    start = torch.randn(NUM_CHAINS, num_data)
    momentum = torch.randn(NUM_CHAINS, num_data) if is_underdamped else None
    noise, target = [torch.randn(NUM_CHAINS, num_data) for _ in range(4)], Target(loc)
    uniforms = [1.0 - torch.rand(num_data) for _ in range(3)]
    log_shares = torch.zeros(NUM_CHAINS, num_data)  # Σ log S V along each path
    products = torch.zeros(num_data)  # log of the product of the means of earlier segments
    base = Normal(0.0, 1.0)
    z, log_w0 = start, -base.log_prob(start)  # with the log ratios
    since = torch.zeros(NUM_CHAINS, num_data)  # weights at the last resampling
    num_resampled = 0
    for k, beta in enumerate(BETA):

        def drift(x, beta=beta):
            return beta * target.score((x,))[0] - (1.0 - beta) * x

        if is_underdamped:
            before = 0.7 * momentum + math.sqrt(1.0 - 0.49) * noise[k]
            half = before + 0.5 * eta * drift(z)
            z = z + eta * half
            momentum = half + 0.5 * eta * drift(z)
            log_w0 = log_w0 + 0.5 * (before.square() - momentum.square())
        else:
            moved = z + eta * drift(z) + (2.0 * eta).sqrt() * noise[k]
            back = (z - moved - eta * drift(moved)) / (2.0 * eta).sqrt()
            z, log_w0 = moved, log_w0 + 0.5 * (noise[k].square() - back.square())
        if k == 3:
            break
        with torch.no_grad():
            log_w = log_w0 + beta * target.log_prob(z) + (1.0 - beta) * base.log_prob(z)
            weights = (log_w - since).softmax(0)  # since the last resampling
            for n in range(num_data):
                if 1.0 / weights[:, n].square().sum() < 0.6 * NUM_CHAINS:
                    num_resampled += 1
                    products[n] += (log_w - since)[:, n].exp().mean().log()
                    a = systematic_ancestors(weights[:, n].log(), uniforms[k][n])
                    since[:, n] = log_w[a, n]
                    index = torch.arange(num_data) == n
                    with torch.enable_grad():
                        z, log_w0 = torch.where(index, z[a], z), torch.where(index, log_w0[a], log_w0)
                        momentum = torch.where(index, momentum[a], momentum) if is_underdamped else None
                    log_shares[:, n] = log_shares[a, n] + (weights[a, n] * NUM_CHAINS).log()
    log_w = log_w0 + target.log_prob(z)
    assert 20 < num_resampled < 150
    last = (log_w - since).logsumexp(0) - math.log(NUM_CHAINS)
    torch.testing.assert_close(found, products + last)
    surrogate = (log_w - log_shares).logsumexp(0) - math.log(NUM_CHAINS)
    torch.testing.assert_close(found, surrogate)
    gradients = [torch.autograd.grad(x.sum(), [loc, eta]) for x in (found, surrogate)]
    torch.testing.assert_close(*gradients)
