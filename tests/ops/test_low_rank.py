"""Rows with a low-rank-plus-diagonal covariance beside dense multivariate normals."""

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_lvgp.ops import low_rank
from pyro_lvgp.ops.expected_log_likelihood import evaluate, gaussian_quadratic
from pyro_lvgp.ops.linalg import invert_lower, sparse_conditional
from pyro_lvgp.ops.rbf_score import rbf_score, score

pytestmark = pytest.mark.usefixtures("float64")
N, D, r, M = 6, 5, 2, 4


class Problem:
    """Rows with a pattern of missing entries each: none, all, the last, and random ones."""

    def __init__(self, rank: int = r):
        self.W, self.psi = torch.randn(D, rank), torch.rand(D) + 0.3
        self.residual, self.variance = torch.randn(N, D), torch.rand(N, D)
        self.observed = torch.rand(N, D) > 0.4
        self.observed[0], self.observed[1] = True, False
        self.observed[2] = torch.arange(D) < D - 1

    def dense(self, n: int, extra: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the observed entries of a row, and the covariance of all its entries."""
        diagonal = self.psi if extra is None else self.psi + extra
        return self.observed[n].nonzero().squeeze(-1), self.W @ self.W.mT + diagonal.diag()


@pytest.fixture(params=[0, 1, r])
def rows(request) -> Problem:
    return Problem(request.param)


def test_densities_are_those_of_the_dense_normal_of_the_observed_entries(rows):
    posterior = low_rank.factor_posterior(rows.W, rows.psi, rows.observed)
    found = low_rank.log_prob(posterior, rows.residual), low_rank.precision_times(posterior, rows.residual)
    diagonal = low_rank.marginal_precision(posterior)
    for n in range(N):
        o, S = rows.dense(n)
        S_oo, e = S[o][:, o], rows.residual[n, o]
        want = MultivariateNormal(torch.zeros(len(o)), S_oo).log_prob(e) if len(o) else torch.zeros(())
        torch.testing.assert_close(found[0][n], want)
        precision = torch.zeros(D, D)
        precision[o[:, None], o] = torch.linalg.inv(S_oo)
        torch.testing.assert_close(found[1][n], precision @ rows.residual[n])
        torch.testing.assert_close(diagonal[n], precision.diagonal())


def test_complete_rows_share_one_factorisation():
    rows = Problem()
    shared, own = low_rank.factor_posterior(rows.W, rows.psi), torch.ones(N, D, dtype=torch.bool)
    assert shared.scale_tril.shape == (r, r)
    own = low_rank.factor_posterior(rows.W, rows.psi, own)
    for of in (low_rank.log_prob, low_rank.precision_times, low_rank.factor_mean):
        torch.testing.assert_close(of(shared, rows.residual), of(own, rows.residual))
    found = low_rank.expected_log_prob(shared, rows.residual, rows.variance)
    torch.testing.assert_close(found, low_rank.expected_log_prob(own, rows.residual, rows.variance))


def test_expectation_over_functions_is_that_of_the_dense_normal(rows):
    """In closed form: log N(y; m, Σ) − ½ tr(Σ⁻¹ diag v), and by a million draws of f."""
    posterior = low_rank.factor_posterior(rows.W, rows.psi, rows.observed)
    found = low_rank.expected_log_prob(posterior, rows.residual, rows.variance)
    for n in range(N):
        o, S = rows.dense(n)
        if not len(o):
            assert found[n] == 0.0
            continue
        normal = MultivariateNormal(torch.zeros(len(o)), S[o][:, o])
        v = rows.variance[n, o]
        closed = normal.log_prob(rows.residual[n, o]) - 0.5 * (normal.precision_matrix.diagonal() * v).sum()
        torch.testing.assert_close(found[n], closed)
        draws = normal.log_prob(rows.residual[n, o] - v.sqrt() * torch.randn(100_000, len(o)))
        assert abs(draws.mean() - found[n]) < 4.0 * draws.std() / 100_000**0.5


def test_missing_entries_given_observed_ones_are_those_of_the_dense_normal(rows):
    posterior = low_rank.factor_posterior(rows.W, rows.psi, rows.observed)
    mean = low_rank.residual_mean(posterior, rows.residual)
    torch.testing.assert_close(mean, low_rank.factor_mean(posterior, rows.residual) @ rows.W.mT)
    covariance = posterior.loadings @ posterior.loadings.mT + rows.psi.diag()
    for n in range(N):
        o, S = rows.dense(n)
        m = (~rows.observed[n]).nonzero().squeeze(-1)
        gain = torch.linalg.solve(S[o][:, o], S[o][:, m]).mT
        torch.testing.assert_close(mean[n, m], gain @ rows.residual[n, o])
        torch.testing.assert_close(covariance[n][m][:, m], S[m][:, m] - gain @ S[o][:, m])


def test_values_of_missing_entries_have_no_influence():
    rows = Problem()
    other = torch.where(rows.observed, rows.residual, 1e3)
    posterior = low_rank.factor_posterior(rows.W, rows.psi, rows.observed)
    for of in (low_rank.log_prob, low_rank.precision_times, low_rank.residual_mean):
        torch.testing.assert_close(of(posterior, other), of(posterior, rows.residual))


def test_strong_factors_cost_no_digits_in_single_precision():
    """Residuals of size 100 along the factor, with noise of 0.1: the terms of Woodbury's formula are about 10⁶."""
    W, psi = 100.0 * torch.randn(D, 1), torch.full((D,), 0.01)
    e = W[:, 0] * torch.randn(N, 1) + 0.1 * torch.randn(N, D)
    exact = low_rank.log_prob(low_rank.factor_posterior(W, psi), e)
    single = low_rank.log_prob(low_rank.factor_posterior(W.float(), psi.float()), e.float())
    assert (single - exact).abs().max() < 0.05


def test_gradients_are_right():
    rows = Problem()

    def density(W, psi, residual, variance):
        posterior = low_rank.factor_posterior(W, psi, rows.observed)
        return low_rank.expected_log_prob(posterior, residual, variance), low_rank.residual_mean(posterior, residual)

    inputs = (rows.W, rows.psi, rows.residual, rows.variance)
    assert torch.autograd.gradcheck(density, tuple(x.requires_grad_() for x in inputs))


def quadratic_problem(particles=()):
    u, L = torch.randn(*particles, D, M), 0.5 * torch.randn(D, M, M).tril()
    a = 0.4 * torch.randn(*particles, M, N)
    return u, L, a, a.square().sum(-2) + 0.3


@pytest.mark.parametrize("particles", [(), (3,)])
@pytest.mark.parametrize("pattern", ["complete", "all rows", "incomplete rows"])
@pytest.mark.parametrize("uncertain", [False, True])
def test_quadratic_form_is_the_expected_log_density(uncertain, pattern, particles):
    rows = Problem()
    u, L, a, variance = quadratic_problem(particles)
    L = L if uncertain else None
    # Luu = I, so that a is the kernel vector itself.
    mean, f_variance = sparse_conditional(torch.eye(M), a, variance, u, L)
    observed = None if pattern == "complete" else rows.observed
    incomplete = (~rows.observed.all(-1)).nonzero().squeeze(-1) if pattern == "incomplete rows" else None
    want = low_rank.expected_log_prob(
        low_rank.factor_posterior(rows.W, rows.psi, observed), rows.residual - mean, f_variance.expand_as(mean)
    )
    form = low_rank.low_rank_quadratic(rows.residual, observed, rows.W, rows.psi, u, L, incomplete)
    torch.testing.assert_close(evaluate(form, a.mT, variance), want)
    assert (form.deficit is None) == (observed is None)


@pytest.mark.parametrize("particles", [(), (3,)])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("uncertain", [False, True])
@pytest.mark.parametrize("columns", [1, D])
def test_quadratic_form_of_rows_with_variances_of_their_own(uncertain, gaps, particles, columns):
    rows, own = Problem(), torch.rand(N, columns)
    u, L, a, variance = quadratic_problem(particles)
    L, observed = L if uncertain else None, rows.observed if gaps else None
    mean, f_variance = sparse_conditional(torch.eye(M), a, variance, u, L)
    posterior = low_rank.factor_posterior(rows.W, rows.psi + own, observed)
    want = low_rank.expected_log_prob(posterior, rows.residual - mean, f_variance.expand_as(mean))
    form = low_rank.low_rank_quadratic(rows.residual, observed, rows.W, rows.psi, u, L, variance=own)
    torch.testing.assert_close(evaluate(form, a.mT, variance), want)


def test_small_noise_beside_large_known_variances_costs_no_digits_in_single_precision():
    rows, own = Problem(), torch.ones(N, 1)
    psi = torch.full((D,), 1e-6)
    u, L, a, variance = quadratic_problem()
    exact = low_rank.low_rank_quadratic(rows.residual, None, rows.W, psi, u, L, variance=own)
    tensors = (x.float() for x in (rows.W, psi, u, L))
    single = low_rank.low_rank_quadratic(rows.residual.float(), None, *tensors, variance=own.float())
    found, want = evaluate(single, a.mT.float(), variance.float()), evaluate(exact, a.mT, variance)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-4)


def test_quadratic_form_without_factors_is_that_of_the_gaussian():
    rows = Problem(0)
    u, L, _, _ = quadratic_problem()
    found = low_rank.low_rank_quadratic(rows.residual, rows.observed, rows.W, rows.psi, u, L)
    for one, other in zip(found, gaussian_quadratic(rows.residual, rows.observed, 1.0 / rows.psi, u, L), strict=True):
        torch.testing.assert_close(one, other)


def test_score_of_the_form_is_its_gradient():
    rows = Problem()
    u, L, _, _ = quadratic_problem()
    Z, X = torch.randn(M, 2), torch.randn(N, 2, requires_grad=True)

    def kernel(A, B):
        return (-0.5 * torch.cdist(A, B).square()).exp()

    Luu_inv = invert_lower(torch.linalg.cholesky(kernel(Z, Z)))
    form = low_rank.low_rank_quadratic(rows.residual, rows.observed, rows.W, rows.psi, u, L)
    (want,) = torch.autograd.grad(evaluate(form, kernel(X, Z) @ Luu_inv.mT, torch.ones(N)).sum(), X)
    coefficients = rbf_score(form, Luu_inv, Z, torch.tensor(1.0), torch.ones(2))
    torch.testing.assert_close(score(coefficients, X.detach()), want - X)


def test_gradients_of_the_form_are_right():
    rows, (u, L, a, variance) = Problem(), quadratic_problem()

    def value(W, psi, u, L):
        return evaluate(low_rank.low_rank_quadratic(rows.residual, rows.observed, W, psi, u, L.tril()), a.mT, variance)

    assert torch.autograd.gradcheck(value, tuple(x.requires_grad_() for x in (rows.W, rows.psi, u, L)))
