"""Learned reverse kernels of chains to Gaussian targets, whose exact reverse is known."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from pyro_lvgp.guides.annealed._chain import AnnealedChain
from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin, UnderdampedLangevin

pytestmark = pytest.mark.usefixtures("float64")
TRANSITIONS = {"overdamped": OverdampedLangevin, "underdamped": UnderdampedLangevin}


class GaussianTarget:
    """N(mean, 1 / precision)."""

    differentiable = True

    def __init__(self, mean, precision):
        self.mean, self.precision = mean, precision

    def score(self, z):
        return (-self.precision * (z[0] - self.mean),)

    def log_joint(self, z):
        return self.log_prob(z[0]).sum()

    def log_prob(self, z):
        return Normal(self.mean, self.precision**-0.5).log_prob(z)


def exact_reverse(target, beta, eps, gamma):
    """Coefficients of the exact reverse kernels of a chain, and mean and variance of its last position."""
    mean, cov, coefficients = torch.zeros(2), torch.eye(2), []
    following = [*gamma[1:], 0.0]

    def leapfrog(b, e):
        precision, pull = b * target.precision + 1.0 - b, b * target.precision * target.mean
        kick = torch.tensor([[1.0, 0.0], [-0.5 * e * precision, 1.0]])
        drift = torch.tensor([[1.0, e], [0.0, 1.0]])
        shift = torch.tensor([0.0, 0.5 * e * pull])
        return kick @ drift @ kick, kick @ drift @ shift + shift

    for k, (b, e) in enumerate(zip(beta, eps, strict=True)):
        keep = torch.diag(torch.tensor([1.0, gamma[k]]))
        mean, cov = keep @ mean, keep @ cov @ keep + torch.diag(torch.tensor([0.0, 1.0 - gamma[k] ** 2]))
        move, shift = leapfrog(b, e)
        mean, cov = move @ mean + shift, move @ cov @ move.mT
        g, fresh = following[k], math.sqrt(1.0 - following[k] ** 2)
        # z, refreshed momentum and u as functions of z, momentum and fresh noise
        to = torch.tensor([[1.0, 0.0, 0.0], [0.0, g, fresh], [0.0, fresh, -g]])
        joint = to @ torch.block_diag(cov, torch.ones(1, 1)) @ to.mT
        centre = to @ torch.cat([mean, torch.zeros(1)])
        slopes = torch.linalg.solve(joint[:2, :2], joint[:2, 2])
        variance = joint[2, 2] - slopes @ joint[:2, 2]
        a = centre[2] - slopes @ centre[:2]
        coefficients.append(torch.stack([a, slopes[0], torch.zeros(()), slopes[1], 0.5 * variance.log()]))
    return torch.stack(coefficients)[..., None], mean[0], cov[0, 0]


def make_chain(dynamics, target, beta, step_size, gamma, coefficients, max_drift=math.inf):
    return AnnealedChain(
        target,
        TRANSITIONS[dynamics](max_drift),
        torch.tensor(beta),
        [torch.tensor(step_size)[:, None]],
        torch.tensor(gamma),
        None,
        [coefficients],
    )


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_exact_kernels_leave_the_divergence_of_the_last_position_alone(dynamics):
    target, beta, step_size = GaussianTarget(0.7, 3.0), [0.2, 0.5, 0.8, 1.0], [0.3, 0.2, 0.25, 0.1]
    gamma = [0.0] * 4 if dynamics == "overdamped" else [0.8, 0.5, 0.7, 0.9]
    eps = [math.sqrt(2.0 * x) for x in step_size] if dynamics == "overdamped" else step_size
    coefficients, mean, variance = exact_reverse(target, beta, eps, gamma)
    torch.manual_seed(0)
    z = torch.randn(1000, 1)
    ends = make_chain(dynamics, target, beta, step_size, gamma, coefficients).run((z,))
    log_w = target.log_prob(ends.z[0]) - Normal(0.0, 1.0).log_prob(z) + ends.log_ratio[0]
    torch.testing.assert_close(log_w, target.log_prob(ends.z[0]) - Normal(mean, variance.sqrt()).log_prob(ends.z[0]))
    plain = make_chain(dynamics, target, beta, step_size, gamma, torch.zeros_like(coefficients)).run((z,))
    plain_log_w = target.log_prob(plain.z[0]) - Normal(0.0, 1.0).log_prob(z) + plain.log_ratio[0]
    assert log_w.mean() > plain_log_w.mean() + 0.05


def test_weights_are_constant_where_the_last_position_has_the_law_of_the_target():
    """(1 − η τ)² + 2 η = 1 / τ at τ = ½."""
    target, step_size = GaussianTarget(0.0, 0.5), [2.0 * (math.sqrt(2.0) - 1.0)]
    coefficients, _, variance = exact_reverse(target, [1.0], [math.sqrt(2.0 * step_size[0])], [0.0])
    assert variance == pytest.approx(2.0)
    z = torch.randn(1000, 1)
    ends = make_chain("overdamped", target, [1.0], step_size, [0.0], coefficients).run((z,))
    log_w = target.log_prob(ends.z[0]) - Normal(0.0, 1.0).log_prob(z) + ends.log_ratio[0]
    torch.testing.assert_close(log_w, torch.zeros_like(log_w), atol=1e-10, rtol=0.0)


class Correlated:
    """N(m, Λ⁻¹) in two dimensions, not normalised."""

    differentiable = True

    precision = torch.tensor([[3.0, 1.0], [1.0, 2.0]]).double()
    mean = torch.tensor([1.0, -0.5]).double()
    log_z = math.log(2.0 * math.pi) - 0.5 * math.log(5.0)

    def score(self, z):
        return (-(z[0] - self.mean) @ self.precision,)

    def log_joint(self, z):
        return -0.5 * ((z[0] - self.mean) @ self.precision * (z[0] - self.mean)).sum(-1)


class Quartic:
    """exp(−z⁴ / 4 + z), with a normaliser by quadrature."""

    differentiable = True

    grid = torch.linspace(-8.0, 8.0, 20_001).double()[:, None]

    def score(self, z):
        return (1.0 - z[0] ** 3,)

    def log_joint(self, z):
        return (z[0] - 0.25 * z[0] ** 4).sum(-1)

    @property
    def log_z(self):
        return torch.trapezoid(self.log_joint((self.grid,)).exp(), self.grid[:, 0]).log().item()


@pytest.mark.parametrize("max_drift", [math.inf, 0.5])
@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
@pytest.mark.parametrize("target", [Correlated(), Quartic()], ids=["correlated", "quartic"])
def test_weights_are_unbiased_for_any_kernels(target, dynamics, max_drift):
    torch.manual_seed(1)
    dim = 2 if isinstance(target, Correlated) else 1
    gamma = [0.0] * 3 if dynamics == "overdamped" else [0.8, 0.5, 0.6]
    coefficients = 0.15 * torch.randn(3, 5, dim)
    z = torch.randn(200_000, dim)
    ends = make_chain(dynamics, target, [0.3, 0.7, 1.0], [0.1, 0.15, 0.1], gamma, coefficients, max_drift).run((z,))
    log_w = target.log_joint(ends.z) - Normal(0.0, 1.0).log_prob(z).sum(-1) + ends.log_ratio[0].sum(-1)
    w = (log_w - target.log_z).exp()
    error = w.std() / len(w) ** 0.5
    assert error < 0.02
    assert abs(w.mean() - 1.0) < 4.0 * error


@pytest.mark.parametrize("dynamics", list(TRANSITIONS))
def test_inverse_weights_are_unbiased_from_exact_draws(dynamics):
    torch.manual_seed(1)
    target = Correlated()
    gamma = [0.0] * 3 if dynamics == "overdamped" else [0.8, 0.5, 0.6]
    coefficients = 0.1 * torch.randn(3, 5, 2)
    z = MultivariateNormal(target.mean, precision_matrix=target.precision).sample((200_000,))
    chain = make_chain(dynamics, target, [0.3, 0.7, 1.0], [0.1, 0.15, 0.1], gamma, coefficients)
    ends = chain.reversed().run((z,))
    log_w = target.log_joint((z,)) - Normal(0.0, 1.0).log_prob(ends.z[0]).sum(-1) - ends.log_ratio[0].sum(-1)
    inverse = (target.log_z - log_w).exp()
    error = inverse.std() / len(inverse) ** 0.5
    assert error < 0.05
    assert abs(inverse.mean() - 1.0) < 4.0 * error
    assert log_w.mean() > target.log_z
