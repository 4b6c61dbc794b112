"""Forward and backward graphs of a function: results, saved tensors, and no expensive operation computed twice."""

import torch

from pyro_lvgp._compile.gradient_graphs import split_gradient
from pyro_lvgp._compile.recording import record_pure


def layer(W, x):
    return torch.tanh(W @ torch.exp(-(x @ x.mT).square()))


def layer_and_gradients(W, x, of_y):
    W, x = W.detach().requires_grad_(), x.detach().requires_grad_()
    y = layer(W, x)
    return [y.detach(), *torch.autograd.grad(y, [W, x], of_y)]


def calls(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def split():
    torch.manual_seed(0)
    given = [torch.randn(*shape, dtype=torch.float64) for shape in ((3, 4), (4, 2), (3, 4))]
    joint = record_pure(layer_and_gradients, given)
    return joint, split_gradient(joint, num_inputs=2, num_outputs=1)


def test_both_graphs_are_the_function_and_its_gradient():
    _, (forward, backward, _) = split()
    W, x, of_y = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 4), (4, 2), (3, 4)))
    y, *saved = forward(W, x)
    gradients = backward(W, x, *saved, of_y)
    for found, expected in zip([y, *gradients], layer_and_gradients(W, x, of_y), strict=True):
        torch.testing.assert_close(found, expected)


def test_products_and_exponentials_are_computed_once():
    joint, (forward, backward, saved) = split()
    for expensive in (torch.ops.aten.mm.default, torch.ops.aten.exp.default):
        assert calls(joint).count(expensive) == calls(forward).count(expensive) + calls(backward).count(expensive)
    # The product under the exponential is needed for the derivative of the square.
    assert [node.target._opname for node in saved] == ["mm", "exp", "mm"]
    # Cheap operations are not saved: the derivative of tanh computes tanh of the product again.
    assert torch.ops.aten.tanh.default in calls(backward)


def test_gradients_that_nothing_is_needed_for_keep_nothing():
    joint = record_pure(lambda x, of_y: [(x @ x).exp(), 2.0 * of_y], [torch.randn(2, 2), torch.randn(2, 2)])
    forward, backward, saved = split_gradient(joint, num_inputs=1, num_outputs=1)
    x = torch.randn(2, 2)
    assert not saved
    assert len(forward(x)) == 1
    assert torch.equal(backward(x, x)[0], 2.0 * x)
