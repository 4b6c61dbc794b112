"""Posteriors under Gaussian sites, against dense algebra with (K + S)⁻¹."""

import math
from functools import partial

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp.ops import gaussian_sites

N, M = 6, 3


pytestmark = pytest.mark.usefixtures("float64")


def kernel(X, Z, lengthscale=0.4):
    distance = (X - Z.mT) / torch.as_tensor(lengthscale).to(X)[..., None, None]
    return 1.5 * (-0.5 * distance.square()).exp()


def problem(K=(), mean=(), site_mean=(), precision=(), num=N, seed=1):
    """Inputs, prior covariance and mean, means and variances of sites, of these batch shapes."""
    torch.manual_seed(seed)
    X = torch.linspace(0.0, 2.0, num)[:, None] + 0.1 * torch.rand(num, 1)
    # A little white noise keeps the oracles, which factorise K itself, exact.
    covariance = kernel(X, X, 0.3 + 0.3 * torch.rand(K)) + 1e-3 * torch.eye(num)
    return X, covariance, torch.randn(*mean, num), torch.randn(*site_mean, num), 0.1 + torch.rand(*precision, num)


def dense(K, m, mu, v):
    """Mean and covariance of q(f), the log normaliser with all its constants, and the KL from the prior."""
    total = K + torch.diag_embed(v)
    gain = K @ torch.linalg.inv(total)
    mean, covariance = m + (gain @ (mu - m)[..., None]).squeeze(-1), K - gain @ K
    log_Z = MultivariateNormal(m, total).log_prob(mu)
    kl = torch.distributions.kl_divergence(MultivariateNormal(mean, covariance), MultivariateNormal(m, K))
    return mean, covariance, log_Z, kl


BATCHES = {
    "single": {},
    "batch": {"K": (3,), "mean": (3,), "site_mean": (3,), "precision": (3,)},
    "one K": {"site_mean": (3,)},
    "one K, many sites": {"site_mean": (3,), "precision": (2, 3)},
    "many K": {"K": (4, 1)},
    "crossed": {"K": (2, 1), "mean": (2, 1), "site_mean": (3,), "precision": (3,)},
}
every_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


@every_batch
def test_against_the_dense_posterior(batch):
    _, K, m, mu, v = problem(**batch)
    posterior = gaussian_sites.condition(K, m, mu, 1.0 / v)
    mean, covariance, log_Z, kl = dense(K, m, mu, v)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.variance, covariance.diagonal(dim1=-2, dim2=-1).expand(mean.shape))
    torch.testing.assert_close(
        gaussian_sites.predictive_covariance(posterior, K, K), covariance.expand(*mean.shape, mean.shape[-1])
    )
    constants = -0.5 * (2.0 * math.pi * v).log()
    torch.testing.assert_close(gaussian_sites.log_normaliser(posterior) + constants.sum(-1), log_Z)
    torch.testing.assert_close(gaussian_sites.kl_divergence(posterior), kl)
    f, variance = torch.randn(mean.shape), torch.rand(mean.shape)
    expected = Normal(mu, v.sqrt()).log_prob(f)
    torch.testing.assert_close(gaussian_sites.log_sites(posterior, f - m) + constants, expected)
    expected = expected - 0.5 * variance / v
    torch.testing.assert_close(gaussian_sites.expected_log_sites(posterior, f - m, variance) + constants, expected)


@every_batch
def test_gradients_against_those_of_the_dense_posterior(batch):
    values = [value.requires_grad_() for value in problem(**batch)[1:]]
    K, m, mu, v = values
    posterior = gaussian_sites.condition(K, m, mu, 1.0 / v)
    constants = -0.5 * (2.0 * math.pi * v).log().sum(-1)
    ours = [
        posterior.mean,
        posterior.variance,
        gaussian_sites.log_normaliser(posterior) + constants,
        gaussian_sites.kl_divergence(posterior),
    ]
    mean, covariance, log_Z, kl = dense(K, m, mu, v)
    for found, expected in zip(ours, (mean, covariance.diagonal(dim1=-2, dim2=-1), log_Z, kl), strict=True):
        expected = expected.expand(found.shape)
        weights = torch.randn(found.shape)
        slopes, slopes_expected = (
            torch.autograd.grad((weights * x).sum(), values, retain_graph=True, materialize_grads=True)
            for x in (found, expected)
        )
        for a, b in zip(slopes, slopes_expected, strict=True):
            # Both take K to be symmetric, and differ in which of its triangles they read.
            a, b = (x + x.mT if x.shape == K.shape else x for x in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@every_batch
def test_gradients_against_those_of_each_operation(batch):
    values = [value.requires_grad_() for value in problem(**batch)[1:]]
    K, m, mu, v = values
    ours = gaussian_sites.condition(K, m, mu, 1.0 / v)
    W = v.rsqrt()
    LB = torch.linalg.cholesky(torch.eye(N) + W[..., :, None] * K * W[..., None, :])
    c = W * (mu - m)
    alpha = torch.cholesky_solve(c[..., None], LB)
    WK = W[..., :, None] * K
    removed = torch.linalg.solve_triangular(LB, WK, upper=False).square().sum(-2)
    slow = gaussian_sites.Posterior(
        m + (WK.mT @ alpha).squeeze(-1),
        K.diagonal(dim1=-2, dim2=-1) - removed,
        W,
        c,
        alpha.squeeze(-1),
        LB.diagonal(dim1=-2, dim2=-1).log().sum(-1),
        LB,
    )
    weights = [torch.randn(value.shape) for value in ours]
    for chosen in [*((i,) for i in range(len(weights))), range(len(weights))]:
        slopes, slopes_expected = (
            torch.autograd.grad(
                sum((weights[i] * posterior[i]).sum() for i in chosen), values, retain_graph=True, materialize_grads=True
            )
            for posterior in (ours, slow)
        )
        for a, b in zip(slopes, slopes_expected, strict=True):
            a, b = (x + x.mT if x.shape == K.shape else x for x in (a, b))  # K is symmetric
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_second_derivatives_and_functional_transforms():
    X, _, m, mu, v = problem()

    def value(lengthscale, v):
        posterior = gaussian_sites.condition(kernel(X, X, lengthscale), m, mu, 1.0 / v)
        return gaussian_sites.kl_divergence(posterior) + posterior.mean.square().sum() + posterior.variance.log().sum()

    arguments = torch.tensor(0.4, requires_grad=True), v.requires_grad_()
    assert torch.autograd.gradgradcheck(value, arguments)
    slopes = torch.autograd.grad(value(*arguments), arguments)
    for a, b in zip(torch.func.grad(value, (0, 1))(*arguments), slopes, strict=True):
        torch.testing.assert_close(a, b)


def test_sites_that_say_nothing_are_left_out():
    _, K, m, mu, v = problem(K=(2,), site_mean=(2,))
    told = torch.tensor([False, True, True, False, True, False])
    precision = torch.where(told, 1.0 / v, 0.0).requires_grad_()
    mu = torch.where(told, mu, 1e6).requires_grad_()
    posterior = gaussian_sites.condition(K, m, mu, precision)
    K_told = K[..., told, :][..., told]
    gain = K[..., told] @ torch.linalg.inv(K_told + torch.diag(v[told]))
    torch.testing.assert_close(posterior.mean, m + (gain @ (mu - m)[..., told, None]).squeeze(-1))
    covariance = K - gain @ K[..., told].mT
    torch.testing.assert_close(posterior.variance, covariance.diagonal(dim1=-2, dim2=-1))
    _, _, log_Z, kl = dense(K_told, m[told], mu[..., told], v[told])
    log_normaliser = gaussian_sites.log_normaliser(posterior)
    torch.testing.assert_close(log_normaliser - 0.5 * (2.0 * math.pi * v[told]).log().sum(), log_Z)
    torch.testing.assert_close(gaussian_sites.kl_divergence(posterior), kl)
    assert (gaussian_sites.log_sites(posterior, torch.randn(N))[..., ~told] == 0.0).all()
    total = log_normaliser.sum() + gaussian_sites.kl_divergence(posterior).sum() + (posterior.mean * posterior.variance).sum()
    for slope in torch.autograd.grad(total, (mu, precision)):
        assert slope.isfinite().all()
        assert (slope[..., ~told] == 0.0).all()
        assert (slope[..., told] != 0.0).all()


def test_no_sites_at_all_give_the_prior():
    X, K, m, mu, _ = problem()
    posterior = gaussian_sites.condition(K, m, mu, torch.zeros(N))
    assert torch.equal(posterior.mean, m)
    assert torch.equal(posterior.variance, K.diagonal())
    assert gaussian_sites.kl_divergence(posterior) == gaussian_sites.log_normaliser(posterior) == 0.0
    X_new = torch.rand(M, 1)
    mean, variance = gaussian_sites.predict(posterior, kernel(X_new, X), kernel(X_new, X_new).diagonal(), torch.ones(M))
    assert torch.equal(mean, torch.ones(M))
    assert torch.equal(variance, torch.full((M,), 1.5))


HARD = {
    "sharp sites": ([0.0, 0.3, 0.5, 1.0, 1.1], [1e-8] * 5),
    "repeated inputs": ([0.3, 0.3, 0.3, 1.0, 1.0], [0.1, 0.2, 0.3, 0.1, 0.1]),
    "repeated inputs, sharp sites": ([0.3, 0.3, 0.3, 1.0, 1.0], [1e-8] * 5),
    "sharp and vague": ([0.0, 0.3, 0.5, 1.0, 1.1], [1e-8, 1e8, 1.0, 1e-8, 1e16]),
    "one point": ([0.3], [0.1]),
    "one point, sharp site": ([0.3], [1e-8]),
}


@pytest.mark.parametrize(("x", "v"), HARD.values(), ids=HARD)
def test_hard_inputs_and_sites(x, v, dtype):
    x, v = torch.tensor(x)[:, None], torch.tensor(v)
    m, mu = torch.zeros(len(x)), x.squeeze(-1).sin()  # one value at each input: sharp sites agree
    inputs = [value.clone().to(dtype).requires_grad_() for value in (x, m, mu, v)]
    cholesky = partial(safe_cholesky, jitter=0.0)
    posterior = gaussian_sites.condition(kernel(inputs[0], inputs[0]), *inputs[1:3], 1.0 / inputs[3], cholesky)
    K = kernel(x, x)
    gain = torch.linalg.solve(K + torch.diag(v), K).mT
    # In float32 sharp sites are at the edge of what I + W K W can hold.
    exact = dtype == torch.float64
    atol = 1e-6 if exact else 2e-3
    torch.testing.assert_close(posterior.mean.double(), gain @ mu, rtol=0.0, atol=atol)
    torch.testing.assert_close(posterior.variance.double(), (K - gain @ K).diagonal(), rtol=0.0, atol=atol)
    assert (posterior.variance > 0.0).all()
    log_Z = gaussian_sites.log_normaliser(posterior)
    if exact:
        expected = MultivariateNormal(m, K + torch.diag(v)).log_prob(mu)
        torch.testing.assert_close(log_Z - 0.5 * (2.0 * math.pi * v).log().sum(), expected, rtol=1e-6, atol=1e-6)
    kl = gaussian_sites.kl_divergence(posterior)
    assert kl >= 0.0
    terms = (log_Z, kl, posterior.mean.sum(), posterior.variance.sqrt().sum(), posterior.variance.log().sum())
    for term in terms:
        for slope in torch.autograd.grad(term, inputs, retain_graph=True, materialize_grads=True):
            assert slope.isfinite().all()


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_a_process_without_variance_somewhere(told, dtype):
    """k(x, z) = s x z at 0: densities of what is known and their gradients stay finite."""
    x = torch.tensor([0.0, 0.5, 1.0], dtype=dtype)
    s = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    mu, precision = torch.tensor([0.3, 0.4, 1.1], dtype=dtype), torch.tensor([float(told), 1.0, 1.0], dtype=dtype)
    posterior = gaussian_sites.condition(s * x[:, None] * x, torch.zeros_like(x), mu, precision.requires_grad_())
    assert posterior.mean[0] == 0.0
    new = gaussian_sites.predict(posterior, s * x[:1, None] * x, s * x[:1].square(), torch.zeros_like(x[:1]))
    for mean, variance in (posterior[:2], new):
        assert (variance > 0.0).all()
        assert variance[0] < 1e-12
        stddev = variance.sqrt()
        for term in ((mean + stddev).sum(), Normal(mean, stddev).log_prob((mean + stddev).detach()).sum()):
            for slope in torch.autograd.grad(term, (s, precision), retain_graph=True, materialize_grads=True):
                assert slope.isfinite().all()


@every_batch
def test_prediction_is_conditioning_with_no_sites_at_new_inputs(batch):
    X, K, m, mu, v = problem(**batch)
    torch.manual_seed(1)
    lengthscale = 0.3 + 0.3 * torch.rand(batch.get("K", ()))
    torch.manual_seed(2)
    X_new, m_new = 3.0 * torch.rand(M, 1), torch.randn(*batch.get("mean", ()), M)
    K_new = kernel(X_new, X, lengthscale)
    posterior = gaussian_sites.condition(K, m, mu, 1.0 / v)
    K_new_new = kernel(X_new, X_new, lengthscale)
    mean, variance = gaussian_sites.predict(posterior, K_new, K_new_new.diagonal(dim1=-2, dim2=-1), m_new)
    covariance = gaussian_sites.predictive_covariance(posterior, K_new, K_new_new)

    both = torch.cat([torch.cat([K, K_new.mT], -1), torch.cat([K_new, K_new_new], -1)], -2)
    nothing = torch.zeros(M)
    slow = gaussian_sites.condition(
        both,
        torch.cat([m, m_new], -1),
        torch.cat([mu, nothing.expand(*mu.shape[:-1], M)], -1),
        torch.cat([1.0 / v, nothing.expand(*v.shape[:-1], M)], -1),
    )
    torch.testing.assert_close(mean, slow.mean[..., N:])
    torch.testing.assert_close(variance, slow.variance[..., N:])
    slow_covariance = gaussian_sites.predictive_covariance(slow, both, both)[..., N:, N:]
    torch.testing.assert_close(covariance, slow_covariance)
    torch.testing.assert_close(covariance.diagonal(dim1=-2, dim2=-1).expand(variance.shape), variance)


@pytest.mark.parametrize("untold", [0, 2])
def test_a_joint_draw_has_the_posterior_s_moments(untold):
    """The draw is affine in the prior's draw L z and in the noise: its moments follow exactly."""
    _, K, m, mu, v = problem()
    precision = torch.where(torch.arange(N) < untold, 0.0, 1.0 / v)
    posterior = gaussian_sites.condition(K, m, mu, precision)
    L, zero, unit = safe_cholesky(K, jitter=0.0), torch.zeros(N), torch.eye(N)
    centre = gaussian_sites.sample_posterior(posterior, zero, K, zero)
    torch.testing.assert_close(m + centre, posterior.mean)
    of_prior = gaussian_sites.sample_posterior(posterior, L.mT, K, zero.expand(N, N)) - centre
    of_noise = gaussian_sites.sample_posterior(posterior, zero, K, unit) - centre
    covariance = of_prior.mT @ of_prior + of_noise.mT @ of_noise
    torch.testing.assert_close(covariance, gaussian_sites.predictive_covariance(posterior, K, K))
