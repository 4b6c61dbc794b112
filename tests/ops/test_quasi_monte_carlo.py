import pytest
import torch
from torch.distributions import Normal

from pyro_lvgp.ops.quasi_monte_carlo import antithetic_normals, qmc_normal

MEAN, STDDEV = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.5, 2.0, 1.0])


def functions(f):
    """A linear function of vectors, a square, a product and a step, whose means are known."""
    z = (f - MEAN) / STDDEV
    return torch.stack([z.sum(-1), z[..., 0].square(), z[..., 0] * z[..., 1], (z[..., 2] > 0.5).to(f)], -1)


@pytest.mark.parametrize("num_draws", [1, 7, 64])
def test_means_are_right_whatever_the_number_of_draws(num_draws):
    repeats = 40_000
    means = functions(qmc_normal(num_draws, Normal(MEAN.expand(repeats, 3), STDDEV))).mean(0)
    expected = torch.tensor([0.0, 1.0, 0.0, Normal(0.0, 1.0).cdf(torch.tensor(-0.5))])
    assert ((means.mean(0) - expected).abs() < 4.0 * means.std(0) / repeats**0.5).all()


def test_means_err_less_than_those_of_independent_draws():
    q = Normal(MEAN.expand(5000, 3), STDDEV)
    even, independent = (functions(draws).mean(0).std(0) for draws in (qmc_normal(100, q), q.sample((100,))))
    assert (even < torch.tensor([0.25, 0.4, 0.6, 0.7]) * independent).all()


def test_vectors_are_independent_in_a_draw_and_over_draws():
    num_draws, num_vectors = 100, 300
    z = qmc_normal(num_draws, Normal(torch.zeros(num_vectors, 1), 1.0)).squeeze(-1)
    correlations = torch.corrcoef(z.T)[~torch.eye(num_vectors, dtype=torch.bool)]
    # The mean square of the correlation of S independent pairs is 1 / (S - 1).
    assert abs(correlations.square().mean() * (num_draws - 1) - 1.0) < 0.05
    assert abs(correlations.mean()) < 0.005


def test_vectors_may_lie_along_any_dimension():
    mean, scale = torch.randn(4, 3, 5, dtype=torch.float64), torch.rand(4, 3, 5, dtype=torch.float64)
    torch.manual_seed(0)
    along = qmc_normal(16, Normal(mean, scale), dim=-2)
    torch.manual_seed(0)
    expected = qmc_normal(16, Normal(mean.mT, scale.mT)).mT
    assert along.dtype == torch.float64
    torch.testing.assert_close(along, expected)


def test_draws_are_finite_in_single_precision():
    assert torch.isfinite(qmc_normal(1000, Normal(torch.zeros(10_000, 1), 1.0))).all()


@pytest.mark.parametrize(("num_draws", "dim"), [(32, 1), (32, 7), (40, 10)])
def test_antithetic_normals_have_the_first_three_moments_of_a_normal(num_draws, dim):
    z = antithetic_normals(num_draws, dim)
    one = torch.eye(dim, dtype=torch.float64)
    torch.testing.assert_close(z.mean(0), torch.zeros_like(one[0]))
    torch.testing.assert_close(z.mT @ z / num_draws, one)
    thirds = torch.einsum("si,sj,sk->ijk", z, z, z)
    torch.testing.assert_close(thirds, torch.zeros_like(thirds))
    torch.testing.assert_close(antithetic_normals(num_draws, dim), z, rtol=0.0, atol=0.0)


def test_antithetic_normals_leave_the_generator_alone_and_integrate_an_exponential():
    state = torch.get_rng_state()
    z = antithetic_normals(32, 2)
    assert torch.equal(torch.get_rng_state(), state)
    f = 0.8 * z[:, 0] + 0.6 * z[:, 1]  # N(0, 1)
    torch.testing.assert_close(f.exp().mean().log(), torch.tensor(0.5, dtype=torch.float64), rtol=0.0, atol=0.03)
