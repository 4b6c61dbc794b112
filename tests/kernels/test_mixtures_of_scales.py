"""Rational quadratic and spectral mixture kernels."""

import math

import pytest
import torch
from sklearn.gaussian_process.kernels import RationalQuadratic as OfSklearn

from pyro_lvgp.kernels import RBF, RationalQuadratic, SpectralMixture
from tests.helpers.points import rand

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_rational_quadratic_is_that_of_scikit_learn(alpha):
    X, Z = rand(6, 2), rand(4, 2)
    expected = OfSklearn(length_scale=0.7, alpha=alpha)(X.numpy(), Z.numpy())
    torch.testing.assert_close(RationalQuadratic(2, alpha, lengthscale=0.7)(X, Z).detach(), torch.as_tensor(expected))


def test_rational_quadratic_is_a_gamma_mixture_of_rbf_kernels():
    """With a gamma density of shape α and rate α over a factor of the inverse squared lengthscale."""
    X, alpha = rand(5, 2), 1.7
    factors = torch.linspace(1e-4, 40.0, 200_001)
    density = torch.distributions.Gamma(alpha, alpha).log_prob(factors).exp()
    squared = (X[:, None] - X).square().sum(-1)
    mixture = torch.trapezoid(density * torch.exp(-0.5 * factors * squared[..., None]), factors)
    torch.testing.assert_close(RationalQuadratic(2, alpha)(X).detach(), mixture, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(RationalQuadratic(2, 1e9)(X), RBF(2)(X), rtol=0.0, atol=1e-7)


def test_spectral_mixtures_of_the_formula():
    weights, locs, scales = torch.rand(3, 2), torch.randn(3, 2, 2), torch.rand(3, 2, 2)
    X, Z = rand(6, 2), rand(4, 2)
    tau = (X[:, None] - Z)[:, :, None]
    kernel = SpectralMixture(2, 2, weights=weights, locs=locs, scales=scales, batch_shape=(3,))
    for b in range(3):
        wave = (2.0 * math.pi * (tau * locs[b]).sum(-1)).cos()
        decay = (-2.0 * math.pi**2 * (tau * scales[b]).square().sum(-1)).exp()
        torch.testing.assert_close(kernel(X, Z)[b].detach(), (weights[b] * wave * decay).sum(-1))
    torch.testing.assert_close(kernel.diagonal(X).detach(), weights.sum(-1, keepdim=True).expand(3, 6))


@pytest.mark.parametrize("make", [RationalQuadratic, lambda Q: SpectralMixture(Q, 2)])
def test_gradients(make):
    kernel, X, Z = make(2), rand(4, 2).requires_grad_(), rand(3, 2)
    names, values = zip(*((n, p.detach().requires_grad_()) for n, p in kernel.named_parameters()), strict=True)

    def of_all(X, *values):
        return torch.func.functional_call(kernel, dict(zip(names, values, strict=True)), (X, Z))

    assert torch.autograd.gradcheck(of_all, (X, *values))
    assert torch.autograd.gradgradcheck(lambda X: kernel(X, X).sum(), (X,))
    assert not kernel.is_markov


def test_waves_of_dates_keep_their_phase():
    X = (738_000.0 + torch.arange(6.0, dtype=torch.float32))[:, None]
    kernel = SpectralMixture(1, locs=torch.tensor([[0.13]]), scales=torch.tensor([[0.01]]))
    torch.testing.assert_close(kernel.float()(X).double(), kernel.double()(X.double()), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: RationalQuadratic(1, 0.0), "alpha > 0, got 0.0"),
        (lambda: SpectralMixture(1, 0), "num_components of 1 or more, got 0"),
        (lambda: SpectralMixture(1, 2, weights=-1.0), "weights > 0, got -1.0"),
        (lambda: SpectralMixture(1, 2, locs=torch.tensor([[0.0], [torch.nan]])), "finite locs numbers, got"),
        (lambda: SpectralMixture(2, 3, locs=torch.ones(3)), r"locs that expands to \[3, 2\]"),
    ],
)
def test_value_errors(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()
