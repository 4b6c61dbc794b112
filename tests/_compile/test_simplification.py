"""Simplified graphs: fewer operations, the same results to the last bit, and tensors that may be written stay their own."""

import pytest
import torch
from torch.fx import symbolic_trace

from pyro_lvgp._compile.recording import record, record_pure
from pyro_lvgp._compile.simplification import simplified

aten = torch.ops.aten


def calls(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def check(function, *arguments):
    """Compare results before and after, twice, with changes in place of the first results; return the operations."""
    graph = record_pure(function, arguments)
    fewer = simplified(graph)
    for _ in range(2):
        inputs = [x.clone() for x in arguments], [x.clone() for x in arguments]
        expected, found = graph(*inputs[0]), fewer(*inputs[1])
        for x, y in zip(expected, found, strict=True):
            assert torch.equal(x, y)
        for result in found:
            result += 1.0
        for x, y in zip(*inputs, strict=True):
            assert torch.equal(x, y)
    return calls(fewer)


def test_repeated_operations_run_once():
    def function(x):
        return (x.exp().sin() + x.exp().sin(), (2.0 * x).cos())

    assert check(function, torch.randn(3)) == [
        aten.exp.default,
        aten.sin.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.cos.default,
    ]


def test_arguments_of_other_types_make_other_operations():
    def function(x):
        return (torch.full_like(x, 1) / 2 + torch.full_like(x, True, dtype=torch.bool) * x.pow(2) + x.pow(2.0),)

    assert aten.pow.Tensor_Scalar in check(function, torch.randn(3))


def test_operations_of_constants_run_never():
    def function(x):
        scale = torch.arange(3.0).exp() * torch.tensor(2.0)
        return (x * scale + scale.sum() * torch.ones_like(x.exp()),)

    assert check(function, torch.randn(3)) == [aten.mul.Tensor, aten.add.Tensor]


def test_operations_that_return_an_argument_never_run():
    def function(x):
        y = torch.ones(3) * (x.exp() * 1.0 - torch.zeros(3)).pow(1.0) / torch.ones(())
        return (y.neg().neg().view(3).sin(), (x.exp() ** 0).cos() * x)

    assert check(function, torch.randn(3)) == [
        aten.exp.default,
        aten.sin.default,
        aten.mul.Tensor,
    ]


def test_a_constant_that_operations_return_is_stored_once():
    def function(x):
        constant = torch.arange(3.0).exp()
        return (x * constant, x.sin() * (constant * 1.0))

    graph = simplified(record_pure(function, [torch.randn(3)]))
    assert len(list(graph.buffers())) == 1


def test_operations_that_change_the_sign_of_zero_or_a_shape_or_a_type_run():
    def function(x):
        return (x.sin() + 0.0).cos(), (x.sin()[:1] * torch.ones(3)).cos(), (x.sin().long() * torch.ones(())).cos()

    found = check(function, torch.tensor([-0.0, 1.0, 2.0]))
    assert found.count(aten.mul.Tensor) == 2
    assert aten.add.Tensor in found


def test_results_are_tensors_of_their_own():
    def function(x):
        y = x.exp()
        zeros = torch.zeros(3)
        return y, x.exp(), zeros, zeros.cos(), torch.ones(3).view(3, 1)[:, 0], torch.ones(())

    check(function, torch.randn(3))


def test_tensors_that_are_written_are_not_shared():
    def function(x):
        first = x.exp()
        second = x.exp()
        view = first.view(3, 1)
        before = first.sin()
        view.mul_(2.0)
        after = first.sin()
        total = torch.zeros(3)
        total.add_(x)
        return before + after + second.sin(), total + torch.zeros(3)

    check(function, torch.randn(3))


def test_values_written_into_constants_are_seen():
    constant = torch.ones(3)
    graph = simplified(record_pure(lambda x: (x * constant.exp(),), [torch.ones(3)]))
    constant.fill_(2.0)
    assert torch.equal(graph(torch.ones(3))[0], constant.exp())


def test_large_constants_are_computed_at_each_call():
    function = lambda x: (x + torch.zeros(400, 400).cos(),)  # noqa: E731
    assert check(function, torch.ones(400, 400)) == [aten.zeros.default, aten.cos.default, aten.add.Tensor]


@pytest.mark.parametrize("draw", [torch.rand_like, torch.bernoulli])
def test_draws_stay_independent(draw):
    x = torch.full((100,), 0.5)
    recording = record(lambda: (draw(x) - draw(x),), [x])
    graph = simplified(recording.graph)
    assert graph(x, *recording.random_inputs())[0].abs().sum() > 0.0


def test_derivatives_are_those_of_autograd():
    def function(x, w):
        x = x.detach().requires_grad_()
        y = torch.nn.functional.softplus(x @ w).clamp(0.5, 2.0).sum()  # the derivative of clamp writes in place
        (score,) = torch.autograd.grad(y, x, create_graph=True)
        return (y.detach(), *(g.detach() for g in torch.autograd.grad(score.square().sum() + y, [x, w])))

    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    graph = record_pure(lambda x, w: function(x, w.detach().requires_grad_()), [x, w.detach()])
    found = check(lambda x, w: function(x, w.detach().requires_grad_()), x, w.detach())
    assert found.count(aten.detach.default) < calls(graph).count(aten.detach.default)
    assert len(found) < 0.9 * len(calls(graph))


def test_functions_of_other_libraries_are_left_as_they_are():
    graph = simplified(symbolic_trace(lambda x: (len([x]) + x.sin() + x.sin(),)))
    assert len(calls(graph)) == 2
