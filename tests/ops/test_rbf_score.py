"""The score of latents beside autograd through the log density."""

import pytest
import torch

from pyro_lvgp.ops.covariance import rbf
from pyro_lvgp.ops.expected_log_likelihood import evaluate, gaussian_quadratic
from pyro_lvgp.ops.linalg import invert_lower
from pyro_lvgp.ops.rbf_score import RBFScore, rbf_score, score

N, D, M, Q = 5, 4, 3, 2


def positive(*shape):
    return torch.rand(shape).double() + 0.5


class Problem:
    """Rows with missing entries or without, and uncertain inducing outputs.

    :param batch: batch of u.
    :param kernel_batch: batch of the kernel.
    """

    def __init__(self, *, missing, batch=(), kernel_batch=()):
        torch.manual_seed(0)
        self.residual, self.observed = torch.randn(N, D).double(), torch.rand(N, D) > 0.4 if missing else None
        self.precision, self.u = positive(D), torch.randn(*batch, D, M).double()
        self.scale_tril = torch.randn(D, M, M).double().tril()
        self.Z, self.variance = torch.randn(M, Q).double(), positive(*kernel_batch)
        self.lengthscale = positive(*kernel_batch, Q)

    def parameters(self):
        tensors = (self.precision, self.u, self.scale_tril, self.Z, self.variance, self.lengthscale)
        return [x.detach().clone().requires_grad_() for x in tensors]

    def form(self, precision, u, scale_tril, Z, variance, lengthscale):
        Luu_inv = invert_lower(torch.linalg.cholesky(rbf(Z, Z, lengthscale, variance) + 1e-6 * torch.eye(M)))
        return gaussian_quadratic(self.residual, self.observed, precision, u, scale_tril), Luu_inv

    def coefficients(self, *parameters):
        return rbf_score(*self.form(*parameters), *parameters[3:])

    def slow_score(self, X, *parameters):
        """The gradient of the log joint density, by autograd."""
        X = X if X.requires_grad else X.detach().requires_grad_()
        form, Luu_inv = self.form(*parameters)
        _, _, _, Z, variance, lengthscale = parameters
        a = rbf(X, Z, lengthscale, variance) @ Luu_inv.mT
        value = evaluate(form, a, variance[..., None].expand(*variance.shape, N)).sum() - 0.5 * X.square().sum()
        return torch.autograd.grad(value, X, create_graph=True)[0]


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("draws", [(), (3,)])
def test_score_and_its_derivatives_are_those_of_autograd(missing, draws):
    problem = Problem(missing=missing)
    X, weight = torch.randn(*draws, N, Q).double(), torch.randn(*draws, N, Q).double()
    results = []
    for function in (lambda X, *p: score(problem.coefficients(*p), X), problem.slow_score):
        leaves = [X.clone().requires_grad_(), *problem.parameters()]
        value = function(*leaves)
        results.append([value, *torch.autograd.grad((weight * value).sum(), leaves)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("kernel_batch", [(), (2,)])
@pytest.mark.parametrize("missing", [False, True])
def test_batches_have_scores_and_derivatives_of_their_own(missing, kernel_batch):
    problem = Problem(missing=missing, batch=(2,), kernel_batch=kernel_batch)
    X, weight = torch.randn(2, N, Q).double(), torch.randn(2, N, Q).double()
    leaves = [X.clone().requires_grad_(), *problem.parameters()]
    value = score(problem.coefficients(*leaves[1:]), leaves[0])
    found = torch.autograd.grad((weight * value).sum(), leaves)
    twins = [X.clone().requires_grad_(), *problem.parameters()]
    expected = problem.slow_score(*twins)
    torch.testing.assert_close(value, expected)
    for fast, slow in zip(found, torch.autograd.grad((weight * expected).sum(), twins), strict=True):
        torch.testing.assert_close(fast, slow)


def test_whitened_score_is_the_score_in_units_of_the_base():
    problem = Problem(missing=True)
    coefficients = problem.coefficients(*problem.parameters())
    z, loc, scale = torch.randn(N, Q).double(), torch.randn(N, Q).double(), positive(N, Q)
    expected = scale * score(coefficients, loc + scale * z)
    torch.testing.assert_close(score(coefficients.whitened(loc, scale), z), expected)


def test_derivatives_by_all_coefficients_are_right():
    problem = Problem(missing=True)
    coefficients = problem.coefficients(*problem.parameters()).whitened(torch.randn(N, Q).double(), positive(N, Q))
    leaves = [x.detach().clone().requires_grad_() for x in (torch.randn(N, Q).double(), *coefficients)]
    assert torch.autograd.gradcheck(lambda X, *tensors: score(RBFScore(*tensors), X), leaves)


def test_derivatives_cannot_be_differentiated_again():
    problem = Problem(missing=False)
    leaves = [torch.randn(N, Q).double().requires_grad_(), *problem.parameters()]
    value = score(problem.coefficients(*leaves[1:]), leaves[0])
    (gradient,) = torch.autograd.grad(value.sum(), leaves[0], create_graph=True)
    assert not gradient.requires_grad
