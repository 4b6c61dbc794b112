import math

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.conjugate import linear_decoder
from pyro_lvgp.conjugate.linear_decoder import DecoderFactors, LatentMoments, Table
from pyro_lvgp.kernels import Matern
from pyro_lvgp.ops.joint_sites import joint_log_normaliser

N, D, Q, R = 6, 3, 2, 1  # points, outputs, processes, white latents
DRAWS = 20_000


class Problem:
    """Small data with gaps, factors of the decoder, and the exact posterior of the latents given these."""

    def __init__(self):
        y = torch.randn(N, D)
        y[2, 1] = y[4] = torch.nan
        self.table = Table.of(y)
        with torch.no_grad():
            self.K = Matern(1, 0.5, lengthscale=torch.tensor([[0.2], [0.8]]), batch_shape=(Q,))(torch.rand(N, 1))
        self.q = linear_decoder.initial_factors(self.table, torch.randn(D, Q + R), torch.full((D,), 0.4), dof=4.0)
        self.q = self.q._replace(
            covariance=0.05 * self.spread(D, Q + R + 1), row_scale=dist.Gamma(2.0 + torch.rand(N), 2.0 + torch.rand(N))
        )

    @staticmethod
    def spread(batch, size):
        root = torch.randn(batch, size, size)
        return root @ root.mT + 0.1 * torch.eye(size)

    def condition(self, q):
        """Moments of all latents, and the log normaliser."""
        linear, precision = linear_decoder.latent_sites(self.table, q)
        h, Lambda, of_white, white = linear_decoder.marginalize_white(linear, precision, q.row_scale.mean, R)
        h.requires_grad_(), Lambda.requires_grad_()
        of_processes = joint_log_normaliser(self.K, h, Lambda)
        mean, half = torch.autograd.grad(of_processes, (h, Lambda))
        moments = LatentMoments(mean, -half - half.mT - mean[:, :, None] * mean[:, None, :])
        return white.joint(moments), (of_processes + of_white).detach()

    def joint_posterior(self, q):
        """Normal over all latents of all points, from the inverse of the dense prior covariance."""
        size = Q + R
        prior = torch.zeros(N, size, N, size)
        for k in range(Q):
            prior[:, k, :, k] = torch.linalg.inv(self.K[k])
        for n in range(N):
            prior[n, Q:, n, Q:] = q.row_scale.mean[n] * torch.eye(R)
        linear, precision = linear_decoder.latent_sites(self.table, q)
        for n in range(N):
            prior[n, :, n, :] += precision[n]
        total = prior.reshape(N * size, N * size)
        return dist.MultivariateNormal(torch.linalg.solve(total, linear.flatten()), precision_matrix=total)

    def bound(self, q):
        constant = linear_decoder.site_constant(self.table, q, R)
        return (self.condition(q)[1] + constant - linear_decoder.divergence(q)).item()


@pytest.fixture
def problem(float64):
    return Problem()


def log_joint_ratio(problem, draws):
    """log p(y, z, w, α, τ, u) − log q for draws of all factors."""
    q, table = problem.q, problem.table
    posterior = problem.joint_posterior(q)
    weights_q = dist.MultivariateNormal(q.mean, q.covariance)
    z, w = posterior.sample((draws,)), weights_q.sample((draws,))
    gammas = {"relevance": q.relevance, "noise": q.noise, "row_scale": q.row_scale}
    drawn = {name: gamma.sample((draws,)) for name, gamma in gammas.items()}
    ratio = -posterior.log_prob(z) - weights_q.log_prob(w).sum(-1)
    ratio -= sum(gamma.log_prob(drawn[name]).sum(-1) for name, gamma in gammas.items())
    prior = dist.Gamma(torch.tensor(linear_decoder.PRIOR_SHAPE), torch.tensor(linear_decoder.PRIOR_RATE))
    ratio += prior.log_prob(drawn["relevance"]).sum(-1) + prior.log_prob(drawn["noise"]).sum(-1)
    ratio += dist.Gamma(q.dof / 2, q.dof / 2).log_prob(drawn["row_scale"]).sum(-1)
    z = z.reshape(draws, N, Q + R)
    scale = drawn["row_scale"].rsqrt()
    for k in range(Q):
        ratio += dist.MultivariateNormal(torch.zeros(N), problem.K[k]).log_prob(z[..., k])
    ratio += dist.Normal(0.0, scale[..., None]).log_prob(z[..., Q:]).sum((-2, -1))
    ratio += dist.Normal(0.0, drawn["relevance"].rsqrt()[:, None]).log_prob(w[..., :-1]).sum((-2, -1))
    ratio += dist.Normal(0.0, linear_decoder.BIAS_PRECISION**-0.5).log_prob(w[..., -1]).sum(-1)
    mean = torch.einsum("snq,sdq->snd", z, w[..., :-1]) + w[:, None, :, -1]
    entries = dist.Normal(mean, drawn["noise"].rsqrt()[:, None] * scale[..., None]).log_prob(table.y)
    return ratio + (table.observed * entries).sum((-2, -1))


def test_the_bound_is_the_expected_log_ratio_of_joint_and_factors(problem):
    ratio = log_joint_ratio(problem, DRAWS)
    assert abs(ratio.mean() - problem.bound(problem.q)) < 4.0 * ratio.std() / math.sqrt(DRAWS)


def test_moments_of_the_latents_equal_the_dense_posterior(problem):
    z, _ = problem.condition(problem.q)
    exact = problem.joint_posterior(problem.q)
    covariance = exact.covariance_matrix.reshape(N, Q + R, N, Q + R)
    torch.testing.assert_close(z.mean, exact.mean.reshape(N, Q + R))
    torch.testing.assert_close(z.covariance, torch.stack([covariance[n, :, n] for n in range(N)]))


def test_the_log_likelihood_of_known_weights_is_that_of_a_multi_output_process(problem):
    """Factors with (almost) no variance: log Z plus the constant is log p(y | W, b, τ, u)."""
    W, noise = torch.randn(D, Q + R + 1), torch.rand(D) + 0.5
    sure = 1e9
    q = problem.q._replace(
        mean=W,
        covariance=1e-14 * torch.eye(Q + R + 1).expand(D, -1, -1),
        noise=dist.Gamma(torch.full((D,), sure), sure * noise),
        row_scale=dist.Gamma(torch.full((N,), sure), torch.full((N,), sure)),
    )
    found = problem.condition(q)[1] + linear_decoder.site_constant(problem.table, q, R)
    covariance = sum(torch.einsum("nm,d,e->ndme", problem.K[k], W[:, k], W[:, k]) for k in range(Q))
    white = W[:, Q:-1] @ W[:, Q:-1].mT + noise.diag()
    covariance = covariance + torch.einsum("nm,de->ndme", torch.eye(N), white)
    seen = problem.table.observed.flatten().bool()
    evidence = dist.MultivariateNormal(W[:, -1].repeat(N)[seen], covariance.reshape(N * D, N * D)[seen][:, seen]).log_prob(
        problem.table.y.flatten()[seen]
    )
    torch.testing.assert_close(found, evidence, rtol=1e-6, atol=1e-6)


def updates(problem, q):
    """Each update by the name of its factor, given the exact posterior of the latents."""
    z, _ = problem.condition(q)
    table = problem.table
    return {
        "weights": linear_decoder.update_weights(table, q, z),
        "relevance": linear_decoder.update_relevance(q),
        "noise": linear_decoder.update_noise(table, q, z),
        "row_scale": linear_decoder.update_row_scales(table, q, z, R),
        "dof": linear_decoder.update_dof(q),
        "rescaled": linear_decoder.rescale_latents(q, z, process_squares(problem, z, q))[0],
    }


def process_squares(problem, z, q):
    """``E[fᵀ K⁻¹ f]`` of each process from the dense posterior."""
    exact = problem.joint_posterior(q)
    second = (exact.covariance_matrix + torch.outer(exact.mean, exact.mean)).reshape(N, Q + R, N, Q + R)
    return torch.stack([(torch.linalg.inv(problem.K[k]) * second[:, k, :, k]).sum() for k in range(Q)])


def test_no_update_lowers_the_bound(problem):
    q = problem.q
    for _ in range(3):
        for name in updates(problem, q):
            before = problem.bound(q)
            q = updates(problem, q)[name]
            assert problem.bound(q) >= before - 1e-9 * abs(before), name


def bound_given(problem, q, z):
    """Bound with fixed moments of the latents, up to a constant: expected log likelihood and prior less divergence."""
    table = problem.table
    residuals = linear_decoder._residual_squares(table, q, z)
    log_scale = torch.digamma(q.row_scale.concentration) - q.row_scale.rate.log()
    log_noise = torch.digamma(q.noise.concentration) - q.noise.rate.log()
    white = z.mean.square()[:, Q:] + z.covariance.diagonal(dim1=-2, dim2=-1)[:, Q:]
    entries = log_noise + log_scale[:, None] - q.noise.mean * q.row_scale.mean[:, None] * residuals
    of_white = (R * log_scale - q.row_scale.mean * white.sum(-1)).sum()
    return (0.5 * ((table.observed * entries).sum() + of_white) - linear_decoder.divergence(q)).item()


def nudged(gamma, factor):
    return dist.Gamma(gamma.concentration * factor, gamma.rate)


@pytest.mark.parametrize("name", ["weights", "relevance", "noise", "row_scale"])
def test_each_update_is_the_maximum_over_its_factor(problem, name):
    z, _ = problem.condition(problem.q)
    q = updates(problem, problem.q)[name]
    best = bound_given(problem, q, z)
    for factor in (0.97, 1.03):
        if name == "weights":
            others = [q._replace(mean=q.mean + (factor - 1.0)), q._replace(covariance=factor * q.covariance)]
        else:
            own = getattr(q, name)
            others = [
                q._replace(**{name: nudged(own, factor)}),
                q._replace(**{name: dist.Gamma(own.concentration, own.rate * factor)}),
            ]
        for other in others:
            assert bound_given(problem, other, z) < best


def test_rescaling_does_not_change_the_mean_of_the_data(problem):
    z, _ = problem.condition(problem.q)
    before = z.with_constant()[0] @ problem.q.mean.mT
    q, rescaled = linear_decoder.rescale_latents(problem.q, z, process_squares(problem, z, problem.q))
    assert not torch.allclose(rescaled.mean, z.mean)
    torch.testing.assert_close(rescaled.with_constant()[0] @ q.mean.mT, before)


def test_extrapolation_by_one_is_the_update_and_by_two_goes_as_far_again(problem):
    q = updates(problem, problem.q)["weights"]
    torch.testing.assert_close(linear_decoder.extrapolate(problem.q, q, 1.0).mean, q.mean)
    twice = linear_decoder.extrapolate(problem.q, q, 2.0)
    torch.testing.assert_close(twice.mean - q.mean, q.mean - problem.q.mean)
    assert isinstance(twice, DecoderFactors)
