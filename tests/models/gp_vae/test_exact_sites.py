"""Linear decoders: evidence and posterior of a multi-output Gaussian process."""

import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch.distributions import MultivariateNormal

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.ops import gaussian_sites
from tests.models.gp_vae._models import M, N, exact, make_exact, make_linear, one_and_several, one_by_one

pytestmark = pytest.mark.usefixtures("float64")
every_linear = pytest.mark.parametrize("num_latents", [1, 2], ids=["one latent", "two latents"])


@every_linear
@one_and_several
def test_exact_sites_give_the_exact_evidence(num_latents, series):
    """The doubly stochastic value and joint draws have no noise left; the semi-analytic value has."""
    model, guide, x, y = make_exact(num_latents, *series)
    evidence = sum(found.log_evidence for found in one_by_one(model, x, y)).item()
    for bound in (*(StructuredELBO(value="doubly-stochastic", gradient_estimator=g) for g in ("path", "score")), Trace_ELBO()):
        for _ in range(2):
            # Joint draws and their densities are those of the prior with jitter, by which the evidence differs.
            assert bound.loss(model, guide, x, y) == pytest.approx(-evidence, rel=1e-8)
    elbo = StructuredELBO(num_particles=500, max_plate_nesting=2)
    losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(20)])
    error = losses.std() / 20**0.5
    assert 0.0 < error < 0.1
    assert abs(losses.mean() + evidence) < 4.5 * error


@every_linear
@one_and_several
def test_exact_sites_give_the_exact_posterior(num_latents, series):
    model, guide, x, y = make_exact(num_latents, *series)
    x_new = torch.rand(*series, M, 1)
    q = poutine.trace(guide).get_trace(x, y).nodes["f"]["fn"].base_dist
    new = q.at(x_new[:, None, None] if series else x_new[None], joint=True)
    K = q.prior.covariance_matrix
    covariance = gaussian_sites.predictive_covariance(q.posterior, K, K)
    lay_out = (lambda part: part.squeeze(1)) if series else (lambda part: part[None])
    moments = [lay_out(part) for part in (q.mean, covariance, new.mean, new.covariance_matrix)]
    for mean, covariance, new_mean, new_covariance, found in zip(*moments, one_by_one(model, x, y, x_new), strict=True):
        f_mean = found.f_mean.unflatten(0, (num_latents, -1))
        torch.testing.assert_close(mean, f_mean[:, :N])
        torch.testing.assert_close(new_mean, f_mean[:, N:])
        blocks = found.f_covariance.unflatten(0, (num_latents, -1)).unflatten(-1, (num_latents, -1))
        for k in range(num_latents):
            torch.testing.assert_close(covariance[k], blocks[k, :N, k, :N])
            torch.testing.assert_close(new_covariance[k], blocks[k, N:, k, N:], rtol=1e-6, atol=1e-6)


@every_linear
def test_exact_sites_give_the_slopes_of_the_exact_evidence(num_latents):
    """Those of sites vanish, those of the kernel have no noise, and those of the decoder have the right mean."""
    model, guide, x, y = make_exact(num_latents)
    evidence = exact(model, x, y).log_evidence
    own = [guide.locs.f_unconstrained, guide.scales.f_unconstrained]
    kernel, others = list(model.kernel.parameters()), [*model.decoder.parameters(), *model.likelihood.parameters()]
    expected = torch.autograd.grad(evidence, kernel + others)
    elbo = StructuredELBO(value="doubly-stochastic", num_particles=200, max_plate_nesting=1)
    runs = []
    for _ in range(20):
        loss = elbo.differentiable_loss(model, guide, x, y)
        slopes = torch.autograd.grad(-loss, own + kernel + others)
        for slope in slopes[:2]:
            torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-9)
        for slope, exactly in zip(slopes[2:4], expected[:2], strict=True):
            torch.testing.assert_close(slope, exactly)
        runs.append(torch.cat([slope.flatten() for slope in slopes[4:]]))
    runs, rest = torch.stack(runs), torch.cat([slope.flatten() for slope in expected[2:]])
    error = runs.std(0) / 20**0.5
    assert error.norm() < 0.1 * rest.norm()
    assert ((runs.mean(0) - rest).abs() < 4.5 * error).all()


@every_linear
def test_other_sites_give_less_by_the_divergence(num_latents):
    """The bound is the evidence less KL(q ‖ p(f | y))."""
    model, guide, x, y = make_exact(num_latents)
    found = exact(model, x, y)
    elbo = StructuredELBO(num_particles=1000, max_plate_nesting=1)
    for _ in range(4):
        guide.locs.f, guide.scales.f = torch.randn(num_latents, N), 0.2 + torch.rand(num_latents, N)
        q = poutine.trace(guide).get_trace(x, y).nodes["f"]["fn"].base_dist
        K = q.prior.covariance_matrix
        covariance = torch.block_diag(*gaussian_sites.predictive_covariance(q.posterior, K, K))
        divergence = torch.distributions.kl_divergence(
            MultivariateNormal(q.mean.flatten(), covariance), MultivariateNormal(found.f_mean, found.f_covariance)
        )
        losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(16)])
        error = losses.std() / 4.0
        assert error < 0.05 * divergence
        assert abs(found.log_evidence - divergence + losses.mean()) < 6.0 * error


def test_svi_finds_the_exact_sites():
    """Sites of their own, with the model held fixed; the noise goes as they come near."""
    model, x, y = make_linear(1)
    guide, loss = StructuredGPGuide(model), StructuredELBO(value="doubly-stochastic", max_plate_nesting=1)
    optim = Adam(lambda name: {"lr": 0.2 if name.startswith("StructuredGPGuide") else 0.0})
    svi = SVI(model, guide, optim, loss)
    losses = [svi.step(x, y) for _ in range(150)]
    found = exact(model, x, y)
    assert losses[0] > 1.0 - found.log_evidence
    q = poutine.trace(guide).get_trace(x, y).nodes["f"]["fn"].base_dist
    spread = found.f_covariance.diagonal().sqrt()
    assert ((q.mean[0] - found.f_mean).abs() < 0.1 * spread).all()
    torch.testing.assert_close(q.variance[0].sqrt(), spread, rtol=0.05, atol=0.0)
    bound = -StructuredELBO(value="doubly-stochastic", num_particles=1000).loss(model, guide, x, y)
    assert found.log_evidence - 0.05 < bound < found.log_evidence + 0.02
