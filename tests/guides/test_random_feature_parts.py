"""Random features, mixtures with pathwise draws, and Gaussians by their precision."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from torch.profiler import ProfilerActivity, profile

from pyro_lvgp.distributions import DiagonalMixture, PrecisionNormal, PrecisionNormalAtMean
from pyro_lvgp.distributions.diagonal_mixture import assignment_logits
from pyro_lvgp.kernels import RBF, mixture_kernel, random_features, spectral_density

pytestmark = pytest.mark.usefixtures("float64")


def _mixture(C=3, Q=2, *batch):
    return DiagonalMixture(torch.randn(*batch, C), torch.randn(C, Q), 0.3 + torch.rand(C, Q))


def _agree(draws, exact):
    """Means of draws along the first dimension, to four standard errors."""
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4.0 * error).all(), (draws.mean(0), exact, error)


@pytest.mark.parametrize("Q", [1, 2])
def test_features_converge_to_the_mixture_kernel(Q):
    mixture, X = _mixture(Q=Q), torch.randn(5, Q)
    exact = mixture_kernel(X, X, mixture.weights, mixture.locs, mixture.scales)
    errors = []
    for num in (100, 100_000):
        features = random_features(X, mixture.sample((num,)))
        torch.testing.assert_close(features.square().sum(-1), torch.ones(5))
        errors.append((features @ features.mT - exact).abs().max())
    assert errors[1] < 0.015
    assert errors[1] < errors[0]


def test_one_component_at_zero_is_an_rbf_kernel():
    lengthscale, X, X2 = torch.tensor([0.7, 2.0]), torch.randn(4, 2), torch.randn(3, 2)
    scales = 1.0 / (2.0 * math.pi * lengthscale)
    kernel = mixture_kernel(X, X2, torch.ones(1), torch.zeros(1, 2), scales[None])
    torch.testing.assert_close(kernel, RBF(2, lengthscale=lengthscale)(X, X2).detach())


def test_kernel_is_the_fourier_transform_of_its_density():
    mixture, tau = _mixture(Q=1), torch.linspace(-1.0, 1.0, 7)[:, None]
    parts = mixture.weights, mixture.locs, mixture.scales
    omega = torch.linspace(-12.0, 12.0, 4001)[:, None]
    density = spectral_density(omega, *parts)
    torch.testing.assert_close(density, density.flip(0))
    transform = torch.trapezoid(density * torch.cos(2.0 * math.pi * tau * omega.mT), omega[:, 0])
    torch.testing.assert_close(transform, mixture_kernel(tau, torch.zeros(1, 1), *parts)[:, 0])


def test_a_kernel_of_many_components_takes_the_memory_of_one():
    mixture, X = _mixture(C=64), torch.randn(50, 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kernel = mixture_kernel(X, X, mixture.weights, mixture.locs, mixture.scales)
    assert max(event.self_cpu_memory_usage for event in profiler.events()) <= 4 * kernel.nbytes
    tau = X[:, None] - X
    waves = (2.0 * math.pi * tau @ mixture.locs.mT).cos()
    decays = (-2.0 * math.pi**2 * tau.square() @ mixture.scales.square().mT).exp()
    torch.testing.assert_close(kernel, (decays * waves) @ mixture.weights)


def test_a_kernel_of_batches_is_that_of_each():
    weights, locs, scales = torch.rand(4, 3), torch.randn(4, 3, 2), torch.rand(3, 2)
    X, X2 = torch.randn(5, 1, 6, 2), torch.randn(7, 2)
    kernels = mixture_kernel(X, X2, weights, locs, scales)
    each = [[mixture_kernel(x[0], X2, w, m, scales) for w, m in zip(weights, locs, strict=True)] for x in X]
    torch.testing.assert_close(kernels, torch.stack([torch.stack(row) for row in each]))


def test_mixture_log_prob_and_moments():
    mixture = _mixture(3, 2, 4)
    value = torch.randn(4, 2)
    slow = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=mixture.logits),
        torch.distributions.Independent(torch.distributions.Normal(mixture.locs, mixture.scales), 1),
    )
    torch.testing.assert_close(mixture.log_prob(value), slow.log_prob(value))
    torch.testing.assert_close(mixture.mean, slow.mean)
    torch.testing.assert_close(mixture.variance, slow.variance)
    draws = mixture.sample((20_000,))
    assert draws.shape == (20_000, 4, 2)
    _agree(draws, mixture.mean)
    _agree((draws - mixture.mean).square(), mixture.variance)
    assert mixture.expand((5, 4)).sample().shape == (5, 4, 2)


@pytest.mark.parametrize("Q", [1, 2, 3])
def test_pathwise_gradients_of_a_mixture(Q):
    """Against moments in closed form, by many draws from one set of weights for each."""
    logits, locs, log_scales = 0.5 * torch.randn(3), torch.randn(3, Q), 0.3 * torch.randn(3, Q)
    num = 40_000
    parameters = [x.expand(num, *x.shape).clone().requires_grad_() for x in (logits, locs, log_scales)]
    z = DiagonalMixture(parameters[0], parameters[1], parameters[2].exp()).rsample()
    gradients = torch.autograd.grad((z.square().sum(-1) + z.prod(-1)).sum(), parameters)
    exact = [x.clone().requires_grad_() for x in (logits, locs, log_scales)]
    weights, scales = exact[0].softmax(-1), exact[2].exp()
    product = exact[1].prod(-1) if Q > 1 else exact[1][:, 0]
    moment = (weights * ((exact[1].square() + scales.square()).sum(-1) + product)).sum()
    for draws, value in zip(gradients, torch.autograd.grad(moment, exact), strict=True):
        _agree(draws, value)


def test_gradients_are_finite_where_components_coincide():
    logits, locs = torch.zeros(3, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    z = DiagonalMixture(logits, locs, torch.ones(3, 2)).rsample((100,))
    for gradient in torch.autograd.grad(z.square().sum(), [logits, locs]):
        assert gradient.isfinite().all()


def test_divergence_of_mixtures_is_that_of_points_and_their_components():
    q = _mixture()
    p = DiagonalMixture(torch.randn(3), torch.randn(3, 2), 0.3 + torch.rand(3, 2))
    value = kl_divergence(q, p)
    which = torch.distributions.Categorical(logits=q.logits).sample((50_000,))
    z = q.locs[which] + q.scales[which] * torch.randn(50_000, 2)
    joint = [m.logits[which] + m._components().log_prob(z[:, None])[torch.arange(50_000), which].sum(-1) for m in (q, p)]
    _agree(joint[0] - joint[1], value)
    draws = q.sample((50_000,))
    assert (q.log_prob(draws) - p.log_prob(draws)).mean() < value
    # With the components of the prior, only the weights differ.
    same = DiagonalMixture(p.logits, q.locs, q.scales)
    categorical = kl_divergence(*(torch.distributions.Categorical(logits=m.logits) for m in (q, same)))
    torch.testing.assert_close(kl_divergence(q, same), categorical)


def test_divergence_of_a_gaussian_is_the_least_over_its_component():
    p, loc, scale = _mixture(), torch.randn(4, 2), 0.5 + torch.rand(4, 2)
    q = torch.distributions.Independent(torch.distributions.Normal(loc, scale), 1)
    value = kl_divergence(q, p)
    best = assignment_logits(loc, scale, p).softmax(-1)
    one_by_one = kl_divergence(torch.distributions.Normal(loc[:, None], scale[:, None]), p._components()).sum(-1)

    def augmented(phi):
        return (phi * (phi.log() - p.logits + one_by_one)).sum(-1)

    torch.testing.assert_close(value, augmented(best))
    assert (value < augmented(torch.rand(4, 3).softmax(-1))).all()
    draws = q.sample((20_000,))
    assert ((q.log_prob(draws) - p.log_prob(draws)).mean(0) < value).all()


@pytest.mark.parametrize("shared", [False, True])
def test_precision_normal_is_the_gaussian(shared):
    A = torch.randn(1 if shared else 3, 4, 4)
    P = A @ A.mT + torch.eye(4)
    loc = torch.randn(3, 4)
    ours = PrecisionNormal(loc, torch.linalg.cholesky(P))
    theirs = MultivariateNormal(loc, precision_matrix=P)
    value = torch.randn(2, 3, 4)
    torch.testing.assert_close(ours.log_prob(value), theirs.log_prob(value))
    torch.testing.assert_close(ours.variance, theirs.variance)
    draws = ours.sample((20_000,))
    assert draws.shape == (20_000, 3, 4)
    white = (torch.linalg.cholesky(P).mT @ (draws - loc)[..., None]).squeeze(-1)
    _agree(white, torch.zeros(3, 4))
    _agree(white[..., :, None] * white[..., None, :], torch.eye(4))
    with pytest.raises(NotImplementedError):
        kl_divergence(ours, theirs)
    assert ours.expand((2, 3)).log_prob(value).shape == (2, 3)


@pytest.mark.parametrize("shared", [False, True])
def test_at_its_mean_a_density_has_all_gradients_but_that_of_the_mean(shared):
    A = torch.randn(1 if shared else 3, 4, 4)
    R = torch.linalg.cholesky(A @ A.mT + torch.eye(4)).requires_grad_()
    loc = torch.randn(3, 4, requires_grad=True)
    q, slow = PrecisionNormalAtMean(loc, R), PrecisionNormal(loc, R)
    value = q.rsample()
    assert torch.equal(value, loc)
    assert not value.requires_grad
    assert torch.equal(q.rsample((2,)), loc.expand(2, 3, 4))
    torch.testing.assert_close(q.expand((2, 3)).rsample(), loc.detach().expand(2, 3, 4))
    for at in (value, value + 1.0):
        torch.testing.assert_close(q.log_prob(at), slow.log_prob(at))
        ours, theirs = (torch.autograd.grad(p.log_prob(at).sum(), [loc, R], allow_unused=True) for p in (q, slow))
        torch.testing.assert_close(torch.zeros(3, 4) if ours[0] is None else ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])


def test_one_precision_for_a_batch_is_that_of_each_and_never_copied():
    D, L = 50, 20
    loc, R = torch.randn(D, L), torch.linalg.cholesky(torch.eye(L) + 0.1)
    found = []
    for shared in (True, False):
        torch.manual_seed(0)
        mean, tril = loc.clone().requires_grad_(), (R[None] if shared else R.expand(D, L, L)).clone().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as calls:
            q = PrecisionNormal(mean, tril)
            draw = q.rsample()
            value = q.log_prob(loc) - q.log_prob(draw.square())
            value.sum().backward()
        largest = max(math.prod(shape) for event in calls.events() for shape in event.input_shapes if shape)
        assert largest == (L * max(D, L) if shared else D * L * L)
        found.append((draw, value, mean.grad, tril.grad.sum(0)))
    torch.testing.assert_close(found[0], found[1])
