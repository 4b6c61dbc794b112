"""Log joint density and bounds, against loops, closed forms and quadrature."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.likelihoods import Gaussian
from tests.helpers.particles import log_joints_of_draws
from tests.models.gplvm._models import D, M, N, Q, make_model, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def _log_joint(model, Y, X, u, idx=None):
    data = {"X": X, "u": u}
    return poutine.trace(poutine.condition(model, data)).get_trace(Y, idx).log_prob_sum()


def _slow_log_joint(model, Y, X, u, entry):
    """One datum and one output at a time, over observed entries only."""
    Z, k = model.inducing_points, model.kernel
    Luu = torch.linalg.cholesky(k(Z) + 1e-8 * model.kernel.variance * torch.eye(M))
    total = dist.Normal(0.0, 1.0).log_prob(X).sum() + dist.Normal(0.0, 1.0).log_prob(u).sum()
    for n in range(len(Y)):
        x = X[n : n + 1]
        A = torch.linalg.inv(Luu) @ k(Z, x)
        s = k(x)[0, 0] - (A * A).sum()
        for d in range(D):
            if not torch.isnan(Y[n, d]):
                total = total + entry(Y[n, d], A[:, 0] @ u[d], s, model.likelihood.variance)
    return total


ENTRY = {
    "svgp": lambda y, m, s, v: dist.Normal(m, v.sqrt()).log_prob(y) - s / (2 * v),
    "fitc": lambda y, m, s, v: dist.Normal(m, (s + v).sqrt()).log_prob(y),
}


@pytest.mark.parametrize("term", ENTRY)
@pytest.mark.parametrize("holes", [False, True])
def test_log_joint_and_gradients_against_a_loop_over_observed_entries(Y, term, holes):
    Y = with_holes(Y) if holes else Y
    model = make_model(likelihood_term=term)
    X, u = torch.randn(N, Q, requires_grad=True), torch.randn(D, M, requires_grad=True)
    fast, slow = _log_joint(model, Y, X, u), _slow_log_joint(model, Y, X, u, ENTRY[term])
    torch.testing.assert_close(fast, slow)
    variables = [X, u, *model.parameters()]
    for a, b in zip(*(torch.autograd.grad(value, variables) for value in (fast, slow)), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_sampled_term_is_unbiased(Y):
    X, u = torch.randn(N, Q), torch.randn(D, M)
    model = make_model()
    exact = _log_joint(model, Y, X, u)
    model.likelihood_term = "sampled"
    draws = log_joints_of_draws(model, Y, X, u, 2000)
    assert abs(draws.mean() - exact) < 4 * draws.std() / 2000**0.5


def test_mini_batches_are_exact(Y):
    """The average over a partition of N/B times the batch is the full-batch log joint."""
    model, X, u = make_model(), torch.randn(N, Q), torch.randn(D, M)
    log_u = dist.Normal(0.0, 1.0).log_prob(u).sum()
    parts = [_log_joint(model, Y[i], X[i], u, i) - log_u for i in torch.randperm(N).split(4)]
    torch.testing.assert_close(sum(parts) / len(parts), _log_joint(model, Y, X, u) - log_u)


def test_mean_field_bound_at_one_dimension_equals_integration(Y):
    """E over u in closed form, E over x on a grid, KLs in closed form."""
    Y = with_holes(Y)
    model = make_model(latent_dim=1, likelihood=Gaussian(0.3))
    guide = MeanFieldGuide(model, init_scale=0.6)
    guide(Y)
    guide.locs.u = torch.randn(D, M)
    guide.locs.X = torch.randn(N, 1)
    with torch.no_grad():
        elbo = TraceMeanField_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1)
        estimates = torch.tensor([-elbo.loss(model, guide, Y) for _ in range(30)])
        m, S = guide.locs.u, guide.scales.u @ guide.scales.u.mT
        loc, scale, noise = guide.locs.X, guide.scales.X, model.likelihood.variance
        Z, k = model.inducing_points, model.kernel
        Luu = torch.linalg.cholesky(k(Z) + 1e-8 * torch.eye(M))
        grid = torch.linspace(-8, 8, 1001)
        bound = -torch.distributions.kl_divergence(
            dist.MultivariateNormal(m, scale_tril=guide.scales.u), dist.MultivariateNormal(torch.zeros(M), torch.eye(M))
        ).sum()
        bound -= torch.distributions.kl_divergence(dist.Normal(loc, scale), dist.Normal(0.0, 1.0)).sum()
        for n in range(N):
            x = (loc[n] + scale[n] * grid)[:, None]
            A = torch.linalg.solve(Luu, k(Z, x))
            for d in range(D):
                if torch.isnan(Y[n, d]):
                    continue
                f_variance = 1.0 - (A * A).sum(0) + torch.einsum("mg,mk,kg->g", A, S[d], A)
                term = dist.Normal(A.mT @ m[d], noise.sqrt()).log_prob(Y[n, d]) - f_variance / (2 * noise)
                bound += torch.trapezoid(dist.Normal(0.0, 1.0).log_prob(grid).exp() * term, grid)
    assert abs(estimates.mean() - bound) < 4 * estimates.std() / len(estimates) ** 0.5


def test_generate():
    trace = poutine.trace(make_model()).get_trace()
    assert trace.nodes["u"]["value"].shape == (D, M)
    assert trace.nodes["X"]["value"].shape == (N, Q)
    assert trace.nodes["y"]["value"].shape == (N, D)
