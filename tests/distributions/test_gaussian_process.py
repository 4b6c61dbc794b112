"""The prior and its posterior under Gaussian sites as distributions, against ``MultivariateNormal``."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.distributions import GaussianProcess, StateSpacePosterior, StructuredPosterior, gaussian_process
from pyro_lvgp.kernels import RBF, Matern, Stack

N, M, Q, B = 5, 3, 2, 4
SAMPLES = 20_000


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=["dense", "state-space"], autouse=True)
def _method(request, monkeypatch):
    """Processes by matrices, and by Kalman filters."""
    monkeypatch.setattr(gaussian_process, "_MIN_STATE_SPACE_POINTS", 0 if request.param == "state-space" else 200)


def make_kernel():
    """Rough enough for oracles without jitter."""
    return Stack(Matern(1, 0.5, variance=1.3, lengthscale=0.4), Matern(1, 0.5, variance=0.7, lengthscale=0.2))


def make_process(series=()):
    X = torch.rand(*series, *(1,) * len(series), 1, N, 1)
    return GaussianProcess(make_kernel(), X)


def make_normal():
    A = torch.randn(Q, N, N)
    return dist.MultivariateNormal(torch.randn(Q, N), A @ A.mT + torch.eye(N))


def make_posterior(prior):
    shape = prior.batch_shape + prior.event_shape
    precision = torch.where(torch.arange(N) == 1, 0.0, 0.5 + torch.rand(shape))
    make = StateSpacePosterior if getattr(prior, "prefers_state_space", False) else StructuredPosterior
    return make(prior, torch.randn(shape), precision)


PRIORS = {"one series": make_process, "several series": lambda: make_process((B,)), "normal": make_normal}
every_prior = pytest.mark.parametrize("make", PRIORS.values(), ids=PRIORS)


def dense(posterior):
    """q(f) by natural parameters."""
    prior, precision = posterior.prior, posterior.site_precision
    covariance = torch.linalg.inv(torch.linalg.inv(prior.covariance_matrix) + torch.diag_embed(precision))
    shift = torch.linalg.solve(prior.covariance_matrix, prior.mean[..., None]).squeeze(-1) + precision * posterior.site_mean
    return MultivariateNormal((covariance @ shift[..., None]).squeeze(-1), covariance)


def assert_moments(draws, mean, covariance):
    """Of draws along the first dimension, within 4.5 standard errors."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert ((draws.mean(0) - mean).abs() < 4.5 * (variance / len(draws)).sqrt()).all()
    centred = draws - mean
    found = (centred[..., :, None] * centred[..., None, :]).mean(0)
    error = ((variance[..., :, None] * variance[..., None, :] + covariance.square()) / len(draws)).sqrt()
    assert ((found - covariance).abs() < 4.5 * error).all()


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_the_prior_is_a_normal_with_the_kernel_s_matrix(series):
    prior = make_process(series)
    K = make_kernel()(prior.X)
    batch = (*series, *(1,) * len(series), Q)
    oracle = MultivariateNormal(torch.zeros(N), K)
    assert (prior.batch_shape, prior.event_shape) == (batch, (N,))
    assert prior.mean.shape == (*batch, N)
    assert (prior.mean == 0.0).all()
    torch.testing.assert_close(prior.variance, oracle.variance)
    torch.testing.assert_close(prior.covariance_matrix, K)
    f = torch.randn(*batch, N)
    # The factor is taken with a jitter of 1e-8.
    torch.testing.assert_close(prior.log_prob(f), oracle.log_prob(f), rtol=1e-6, atol=1e-6)
    assert_moments(prior.rsample((SAMPLES,)), oracle.mean, K)


def test_the_prior_at_other_inputs():
    prior, X = make_process((B,)), torch.rand(M, 1)
    kernel = make_kernel()
    torch.testing.assert_close(prior.at(X).covariance_matrix, kernel(X))
    torch.testing.assert_close(prior.covariance_with(X), kernel(X, prior.X))


def test_the_prior_at_parameters_read_before():
    kernel, X = RBF(1, lengthscale=0.5), torch.rand(N, 1)
    expected = kernel(X).detach()
    prior = GaussianProcess(kernel, X, kernel.params())
    kernel.lengthscale = torch.tensor([0.1])
    torch.testing.assert_close(prior.at(X).covariance_matrix, expected)
    assert not torch.allclose(GaussianProcess(kernel, X).covariance_matrix, expected)


@pytest.mark.parametrize("lengthscale", [1e-3, 1e3])
def test_repeated_inputs_and_long_lengthscales(lengthscale, dtype):
    kernel = RBF(1, lengthscale=lengthscale).to(dtype)
    prior = GaussianProcess(kernel, torch.tensor([[0.1], [0.1], [0.2]], dtype=dtype))
    f = prior.rsample()
    prior.log_prob(f).backward()
    assert f.dtype == dtype
    assert abs(f[0] - f[1]) < (1e-1 if dtype == torch.float32 else 1e-3)
    assert all(parameter.grad.isfinite().all() for parameter in kernel.parameters())


@every_prior
def test_expanding_shares_what_was_computed(make):
    for computed_first in (False, True):
        prior = make()
        posterior = make_posterior(prior)
        if computed_first:
            assert posterior.posterior is not None
        for base in (prior, posterior):
            batch = (7, *base.batch_shape)
            expanded = base.expand(batch)
            again = expanded.expand((6, *batch))
            assert expanded.batch_shape == batch
            assert again.rsample((2,)).shape == (2, 6, *batch, N)
            f = torch.randn(*batch, N)
            torch.testing.assert_close(expanded.log_prob(f), base.log_prob(f))
            for name in ("mean", "variance"):
                torch.testing.assert_close(getattr(expanded, name), getattr(base, name).expand(*batch, N))
        assert posterior.expand((7, *posterior.batch_shape)).expand((6, 7, *posterior.batch_shape)).posterior is (
            posterior.posterior
        )


def test_draws_of_an_expanded_posterior_are_independent():
    posterior = make_posterior(make_process())
    draws = posterior.expand((3, Q)).rsample((SAMPLES,))
    oracle = dense(posterior)
    for member in draws.unbind(1):
        assert_moments(member, oracle.mean, oracle.covariance_matrix)
    first, second = (draws[:, member] - oracle.mean for member in (0, 1))
    error = (oracle.variance[..., :, None] * oracle.variance[..., None, :] / SAMPLES).sqrt()
    assert ((first[..., :, None] * second[..., None, :]).mean(0).abs() < 4.5 * error).all()


@every_prior
def test_the_posterior(make):
    posterior = make_posterior(make())
    oracle = dense(posterior)
    assert posterior.batch_shape == oracle.batch_shape
    torch.testing.assert_close(posterior.mean, oracle.mean)
    torch.testing.assert_close(posterior.variance, oracle.variance)
    f = torch.randn(*oracle.batch_shape, N)
    torch.testing.assert_close(posterior.log_prob(f), oracle.log_prob(f), rtol=1e-6, atol=1e-6)
    assert_moments(posterior.rsample((SAMPLES,)), oracle.mean, oracle.covariance_matrix)
    assert not posterior.sample().requires_grad


def test_draws_of_marginals_are_independent():
    posterior = make_posterior(make_process())
    draws = posterior.expand((SAMPLES, Q)).rsample_marginals()
    assert_moments(draws, posterior.mean, torch.diag_embed(posterior.variance))


@every_prior
def test_kl_from_the_prior_is_registered(make):
    prior = make()
    posterior = make_posterior(prior)
    expected = kl_divergence(dense(posterior), MultivariateNormal(prior.mean, prior.covariance_matrix))
    torch.testing.assert_close(kl_divergence(posterior, prior), expected)
    torch.testing.assert_close(kl_divergence(posterior.to_event(1), prior.to_event(1)), expected.sum(-1))
    expanded = posterior.expand((7, *posterior.batch_shape)).to_event(1)
    torch.testing.assert_close(
        kl_divergence(expanded, prior.expand((7, *prior.batch_shape)).to_event(1)),
        expected.sum(-1).expand(7, *expected.shape[:-1]),
    )


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
@pytest.mark.parametrize("own_inputs", [False, True], ids=["shared", "own"])
def test_the_posterior_at_other_inputs(series, own_inputs):
    posterior = make_posterior(make_process(series))
    X = torch.rand(*(series if own_inputs else ()), *(1,) * (own_inputs and len(series)), 1, M, 1)
    X_both = torch.cat([posterior.prior.X, X.expand(*posterior.prior.X.shape[:-2], M, 1)], -2)
    K = make_kernel()(X_both)
    told = torch.arange(N + M) < N
    told[1] = False  # which has no site
    S = posterior.site_precision[..., told[:N]].reciprocal()
    gain = K[..., told] @ torch.linalg.inv(K[..., told, :][..., told] + torch.diag_embed(S))
    mean = (gain @ posterior.site_mean[..., told[:N], None]).squeeze(-1)[..., N:]
    covariance = (K - gain @ K[..., told, :])[..., N:, N:]
    marginals, joint = posterior.at(X), posterior.at(X, joint=True)
    for found in (marginals, joint):
        torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.variance, covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-6, atol=1e-6)
    oracle = MultivariateNormal(mean, covariance)
    f = torch.randn(oracle.batch_shape + oracle.event_shape)
    # The density is that of values with a little white noise.
    torch.testing.assert_close(joint.log_prob(f), oracle.log_prob(f), rtol=1e-4, atol=1e-4)
    assert_moments(joint.rsample((SAMPLES,)), mean, covariance)
    again = joint.expand((3, *joint.batch_shape))
    assert again.rsample((2,)).shape == (2, 3, *mean.shape)
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(again, name), getattr(joint, name).expand(3, *mean.shape))


def test_joint_prediction_where_data_are():
    """A covariance of low rank: the same input many times."""
    posterior = make_posterior(make_process())
    joint = posterior.at(posterior.prior.X[..., [0, 0, 0, 2], :], joint=True)
    torch.testing.assert_close(joint.mean, posterior.mean[..., [0, 0, 0, 2]])
    draw = joint.sample()
    torch.testing.assert_close(draw[..., 0], draw[..., 1], rtol=0.0, atol=1e-2)


def test_other_inputs_of_a_normal_are_unknown():
    with pytest.raises(TypeError, match=r"got MultivariateNormal; call the guide with the inputs .* together, and NaN"):
        make_posterior(make_normal()).at(torch.rand(M, 1))


def test_both_methods_agree():
    """All that does not depend on draws, and its gradients, at inputs in no order."""
    kernel, X = make_kernel(), torch.rand(B, 1, 1, N, 1)
    prior = GaussianProcess(kernel, X)
    site_mean, precision = torch.randn(B, 1, Q, N, requires_grad=True), torch.rand(B, 1, Q, N, requires_grad=True)
    inputs = [site_mean, precision, *kernel.parameters()]
    f, X_new = torch.randn(7, B, 1, Q, N), 2.0 * torch.rand(M, 1) - 0.5
    found = []
    for make in (StructuredPosterior, StateSpacePosterior):
        q = make(prior, site_mean, precision)
        new = q.at(X_new)
        terms = [q.mean, q.variance, q.log_prob(f), kl_divergence(q, prior), new.mean, new.variance]
        found.append(
            [(x, torch.autograd.grad(x.sin().sum(), inputs, retain_graph=True, materialize_grads=True)) for x in terms]
        )
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_which_processes_prefer_the_state_space(monkeypatch):
    monkeypatch.setattr(gaussian_process, "_MIN_STATE_SPACE_POINTS", 4)
    for kernel, shape, expected in (
        (Matern(1), (5, 1), True),
        (Matern(1), (4, 1), False),
        (Matern(2), (5, 2), False),
        (RBF(1), (5, 1), False),
        (make_kernel(), (B, 1, 5, 1), True),
    ):
        assert GaussianProcess(kernel, torch.rand(shape)).prefers_state_space is expected


@pytest.mark.parametrize(
    ("prior", "what"),
    [
        (lambda: GaussianProcess(RBF(1), torch.rand(N, 1)), "RBF"),
        (lambda: GaussianProcess(Matern(2), torch.rand(N, 2)), "Matern"),
        (make_normal, "MultivariateNormal"),
    ],
)
def test_priors_without_a_state_space(prior, what, unchecked):
    with pytest.raises(ValueError, match=rf'for linear time, got {what}; use method="dense" or method="auto"'):
        StateSpacePosterior(prior(), torch.zeros(N), torch.ones(N))


def test_in_a_model():
    """Plates expand it, sites validate it."""
    prior = make_process()
    with pyro.plate("series", B, dim=-2):
        assert pyro.sample("prior", prior.to_event(1)).shape == (B, 1, Q, N)
        assert pyro.sample("posterior", make_posterior(prior).to_event(1)).shape == (B, 1, Q, N)
    for distribution in (prior, make_posterior(prior)):
        assert distribution.has_rsample
        assert distribution.support.check(distribution.sample()).all()
        with pytest.raises(ValueError, match="within the support"):
            distribution.log_prob(torch.full((Q, N), torch.nan))
        with pytest.raises(ValueError, match="must match"):
            distribution.log_prob(torch.zeros(Q, 1))
