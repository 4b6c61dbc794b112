"""Sums, products and stacks."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample

from pyro_lvgp.kernels import RBF, Combination, Linear, Matern, Periodic, Product, Stack, Sum
from tests.helpers.points import rand


def test_sums_products_and_numbers():
    X, Z = torch.randn(5, 2), torch.randn(3, 2)
    a, b = RBF(2, lengthscale=0.4), Linear(2, variance=3.0)
    torch.testing.assert_close((2.0 * a * b + 1)(X, Z), 2.0 * a(X, Z) * b(X, Z) + 1.0)
    torch.testing.assert_close(sum([a, b])(X, Z), a(X, Z) + b(X, Z))
    torch.testing.assert_close((a * a)(X), a(X).square())
    torch.testing.assert_close(Sum(a, b, 0.5).diagonal(X), a.diagonal(X) + b.diagonal(X) + 0.5)
    assert isinstance(a * 2, Product)
    with pytest.raises(TypeError, match="unsupported operand"):
        a + "b"
    for number in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"finite number ≥ 0 .*, got {number}"):
            a * number
    with pytest.raises(ValueError, match="one or more"):
        Sum()


def _stack():
    parts = [
        RBF(2, lengthscale=torch.tensor([[0.5, 1.0], [2.0, 0.3]]), variance=torch.tensor([1.0, 2.0]), batch_shape=(2,)),
        Matern(1, lengthscale=0.7, active_dims=[1]),
        0.5 * Linear(2) + 1.0,
        Periodic(2, batch_shape=(1,)),
    ]
    return Stack(*parts).double(), parts


@pytest.mark.parametrize("batch", [(), (1,), (3, 1), (2, 3, 1)])
@pytest.mark.parametrize("batch_of_z", [(), (3, 1)])
def test_a_stack_is_its_kernels_one_by_one(batch, batch_of_z):
    stack, (pair, *others) = _stack()
    X, Z = rand(*batch, 7, 2), rand(*batch_of_z, 4, 2)
    joint = torch.broadcast_shapes(batch[:-1], batch_of_z[:-1])
    of_pair = pair(X, Z)
    one_by_one = [of_pair[..., 0, :, :], of_pair[..., 1, :, :]]
    one_by_one += [k(X, Z).expand(*joint, 1, 7, 4).squeeze(-3) for k in others]
    K = stack(X, Z)
    assert stack.batch_shape == (5,)
    assert K.shape == (*joint, 5, 7, 4)
    for k, expected in enumerate(one_by_one):
        torch.testing.assert_close(K[..., k, :, :], expected.expand(*joint, 7, 4))
    assert stack.diagonal(X).shape == (*batch[:-1], 5, 7)
    torch.testing.assert_close(stack.diagonal(X), stack(X).diagonal(dim1=-2, dim2=-1))


def test_gradients_reach_every_kernel_of_a_stack():
    stack, _ = _stack()
    weights = rand(5, 7, 7)
    (weights * stack(rand(7, 2))).sum().backward()
    assert len(list(stack.parameters())) == 8
    for name, parameter in stack.named_parameters():
        assert (parameter.grad != 0.0).all(), name


def test_stacks_of_numbers_and_of_stacks():
    X = rand(4, 2)
    rbf = RBF(2).double()
    K = Stack(rbf, 2.0, Stack(rbf, Linear(2).double()))(X)
    torch.testing.assert_close(K, torch.stack([rbf(X), torch.full_like(K[1], 2.0), rbf(X), X @ X.mT]))


@pytest.mark.parametrize("with_priors", [(0, 3), (3,)])
def test_priors_in_a_stack(with_priors):
    """One draw for all uses in a call, and one for each particle."""
    stack, _ = _stack()
    priors = {0: dist.LogNormal(torch.zeros(2, 2).double(), 1.0), 3: dist.LogNormal(torch.zeros(1, 2).double(), 1.0)}
    for part in with_priors:
        stack.kernels[part].lengthscale = PyroSample(priors[part].to_event(2))
    X = rand(7, 2)
    with pyro.plate("particles", 3, dim=-1):
        trace = poutine.trace(stack).get_trace(X)
    K = trace.nodes["_RETURN"]["value"]
    assert K.shape == (3, 5, 7, 7)
    for particle in range(3):
        names = [f"kernels.{part}.lengthscale" for part in with_priors]
        alone = poutine.condition(stack, {name: trace.nodes[name]["value"][particle] for name in names})(X)
        torch.testing.assert_close(K[particle], alone)


def test_a_prior_needs_a_batch_of_kernels_in_a_stack():
    stack, _ = _stack()
    stack.kernels[1].variance = PyroSample(dist.LogNormal(0.0, 1.0))
    with pyro.plate("particles", 3, dim=-1), pytest.raises(ValueError, match=r"kernels that have priors batch_shape=\(1,\)"):
        stack(rand(7, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stack(), "expected one or more kernels, got none; give kernels to Stack"),
        (
            lambda: Stack(RBF(1), RBF(1, batch_shape=(2, 3))),
            r"expected kernels of batch shape \(\) or \(q,\), got \[\(\), \(2, 3\)\]",
        ),
        (
            lambda: Stack(RBF(1), Periodic(1))(torch.randn(3, 5, 1)),
            r"expected 2 kernels, got 6 from a batch of points or parameters; give points as X.unsqueeze\(-3\)",
        ),
        (
            lambda: Stack(RBF(1), Periodic(1)).diagonal(torch.randn(3, 5, 1)),
            r"expected 2 kernels, got 6 from a batch of points",
        ),
    ],
)
def test_stacks_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_combination_of_a_user():
    class Convex(Combination):
        def k(self, X, Z, params):
            first, second = self.covariances(X, Z, params)
            return 0.3 * first + 0.7 * second

        def k_diagonal(self, X, params):
            first, second = self.diagonals(X, params)
            return 0.3 * first + 0.7 * second

    a, b, X = Matern(1), Matern(1, 0.5, variance=2.0, batch_shape=(3,)), torch.randn(4, 1)
    kernel = Convex(a, b)
    torch.testing.assert_close(kernel(X), 0.3 * a(X) + 0.7 * b(X))
    torch.testing.assert_close(kernel.diagonal(X), torch.full((3, 4), 1.7))
    assert kernel.batch_shape == (3,)
    assert not kernel.is_markov  # it has no state-space model, even if its parts have
