"""Purity of :mod:`pyro_lvgp.ops`: no Python value is made from a tensor."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pyro_lvgp.ops import (
    covariance,
    expected_log_likelihood,
    gaussian_sites,
    linalg,
    low_rank,
    ordered_probit,
    quadrature,
    quasi_monte_carlo,
    rbf_score,
    resampling,
    site_updates,
    sparse_sites,
    state_space,
    student_t,
)
from pyro_lvgp.ops.sparse_sites import Sites
from pyro_lvgp.ops.state_space import Series

VALUES = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy} | {
    getattr(torch.Tensor, name) for name in ("__bool__", "__float__", "__int__", "__index__", "__contains__")
}


class _NoValues(TorchFunctionMode):
    """Refuse to turn a tensor into a Python value."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in VALUES, f"{func} asks a tensor for its value"
        return func(*args, **(kwargs or {}))


def _covariance():
    X, Z, one = torch.rand(4, 2), torch.rand(3, 2), torch.ones(1)
    yield lambda: covariance.squared_distance(X, Z)
    yield lambda: covariance.exact_squared_distance(X, Z)
    yield lambda: covariance.rbf(X, Z, one, one.squeeze())
    yield lambda: [covariance.matern(X, Z, one, one.squeeze(), nu) for nu in (0.5, 1.5, 2.5)]
    yield lambda: covariance.periodic(X, Z, one, one, one.squeeze())
    yield lambda: covariance.linear(X, Z, one)


def _linalg():
    L, B, features = torch.eye(3), torch.rand(2, 3, 4), torch.rand(5, 3)
    yield lambda: linalg.solve_lower(L, B)
    yield lambda: linalg.invert_lower(L)
    yield lambda: linalg.pair_products(features)
    yield lambda: [linalg.function_variance(features, L.expand(D, 3, 3).contiguous()) for D in (1, 6)]
    yield lambda: [linalg.sparse_conditional(L, B, torch.ones(2, 4), torch.rand(5, 3), u) for u in (None, L.expand(5, 3, 3))]
    yield lambda: linalg.sparse_covariance(L, B, torch.eye(4))


def _expected_log_likelihood():
    residual, observed, precision, u = torch.randn(4, 2), torch.rand(4, 2) > 0.5, torch.ones(2), torch.randn(2, 3)
    rows = torch.tensor([0, 2])

    def score(observed, incomplete=None):
        form = expected_log_likelihood.gaussian_quadratic(
            residual, observed, precision, u, torch.eye(3).expand(2, 3, 3), incomplete
        )
        expected_log_likelihood.evaluate(form, torch.rand(4, 3), torch.ones(4))
        return rbf_score.rbf_score(form, torch.eye(3), torch.rand(3, 2), torch.tensor(1.0), torch.ones(1))

    yield lambda: rbf_score.score(score(None), torch.rand(4, 2))
    yield lambda: rbf_score.score(score(observed), torch.rand(4, 2))
    yield lambda: rbf_score.score(score(observed, rows), torch.rand(4, 2))


def _low_rank():
    W, psi, observed = torch.randn(4, 2), torch.ones(4), torch.rand(3, 4) > 0.5
    e, u, rows = torch.randn(3, 4), torch.randn(4, 5), torch.tensor([0, 2])
    yield lambda: low_rank.expected_log_prob(low_rank.factor_posterior(W, psi, observed), e, torch.ones(3, 4))
    yield lambda: low_rank.factor_mean(low_rank.factor_posterior(W, psi), e)
    yield lambda: [low_rank.low_rank_quadratic(e, *gaps, W, psi, u) for gaps in ((None,), (observed,))]
    yield lambda: low_rank.low_rank_quadratic(e, observed, W, psi, u, torch.eye(5).expand(4, 5, 5), rows)


def _gaussian_sites():
    K, zeros, precision = torch.eye(3) + 0.5, torch.zeros(3), torch.tensor([1.0, 0.0, 2.0])

    def posterior():
        return gaussian_sites.condition(K.clone().requires_grad_(), zeros, zeros + 1.0, precision)

    yield lambda: gaussian_sites.kl_divergence(posterior()).backward()
    yield lambda: gaussian_sites.expected_log_sites(posterior(), zeros, precision)
    yield lambda: gaussian_sites.predict(posterior(), K[:2], torch.ones(2), zeros[:2])
    yield lambda: gaussian_sites.predictive_covariance(posterior(), K, K)
    yield lambda: gaussian_sites.sample_posterior(posterior(), zeros, K, zeros)


def _sparse_sites():
    A, ones = torch.rand(3, 5), torch.ones(5)

    def posterior(sites):
        return sparse_sites.posterior(sites, torch.linalg.cholesky(sparse_sites.reversed_precision(sites)))

    yield lambda: sparse_sites.marginals(A, 5.0 * ones, *posterior(sparse_sites.aggregate(A, ones, ones)))
    yield lambda: sparse_sites.transfer(Sites(torch.eye(3), torch.ones(3)), 0.1 * torch.rand(2, 3))
    yield lambda: sparse_sites.sum_at(sparse_sites.nearest(A, 2), torch.rand(5, 2), 3)


def _state_space():
    steps, *orders = state_space.sort_inputs(torch.tensor([0.0, 2.0, 1.0]))
    one, ones = torch.tensor(1.0), torch.ones(3)

    def series():
        models = [state_space.matern(steps, one, one, nu) for nu in (0.5, 1.5, 2.5)]
        product = state_space.multiply(models[0], state_space.constant(steps, 2.0))
        return Series(state_space.add([*models, product]), *orders)

    def posterior():
        return state_space.condition(series(), ones, ones)

    yield lambda: gaussian_sites.kl_divergence(posterior())
    yield lambda: state_space.log_normaliser(series(), ones, ones)
    yield lambda: state_space.log_prob(series(), ones, jitter=1e-5)
    yield lambda: state_space.sample_prior(series(), torch.randn(3, 7))
    yield lambda: state_space.sample_posterior(series(), posterior(), ones, ones)


def _quadrature():
    mean, variance = torch.zeros(2), torch.tensor([0.0, 2.0])
    yield lambda: quadrature.gauss_hermite(torch.sin, mean, variance, log=True)
    square = lambda f: -f.square(), lambda f: (-2.0 * f, torch.full_like(f, -2.0))
    yield lambda: quadrature.log_expectation_at_mode(*square, mean, variance, mean)
    yield lambda: quadrature.log_expectation_derivatives(*square, mean, variance, mean)
    yield lambda: student_t.log_student_t_plus_normal(mean, variance + 1.0, 4.0, variance)
    yield lambda: student_t.log_student_t_plus_normal_derivatives(mean, variance + 1.0, 4.0, variance)
    yield lambda: student_t.expected_log_student_t(mean, variance + 1.0, 4.0, variance)
    yield lambda: ordered_probit.expected_log_interval(torch.tensor([-torch.inf, 0.0]), torch.tensor([0.0, 1.0]), variance)


def _quasi_monte_carlo():
    normal = torch.distributions.Normal(torch.zeros(3, 2), 1.0)
    yield lambda: quasi_monte_carlo.qmc_normal(4, normal)
    yield lambda: quasi_monte_carlo.antithetic_normals(8, 2)


def _site_updates():
    sites, one = site_updates.NaturalSites(torch.randn(3), torch.ones(3)), torch.ones(3)
    yield lambda: site_updates.natural_gradient_step(sites, one, one, one, one)
    yield lambda: sites.mean


def _resampling():
    yield lambda: resampling.resample(torch.randn(4, 3), torch.rand(3), 0.5)


CALLS = (
    _covariance,
    _linalg,
    _low_rank,
    _expected_log_likelihood,
    _gaussian_sites,
    _sparse_sites,
    _state_space,
    _quadrature,
    _quasi_monte_carlo,
    _site_updates,
    _resampling,
)


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__.removeprefix("_"))
def test_functions_never_ask_a_tensor_for_its_value(calls, unchecked):
    for call in calls():
        with _NoValues():
            call()


def test_the_mode_finds_values():
    with _NoValues(), pytest.raises(AssertionError, match="asks a tensor for its value"):
        bool(torch.ones(()) > 0.0)
