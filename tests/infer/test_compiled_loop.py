"""Compiled loops against eager recursions: values, gradients, and one set of graphs for any number of steps."""

import pytest
import torch

from pyro_lvgp._compile.recording import record
from pyro_lvgp.infer import _compiled_loop
from pyro_lvgp.infer._compiled_loop import CompiledLoop

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def graphs(monkeypatch):
    """Graphs that are compiled, which run eagerly here."""
    compiled = []
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: compiled.append(graph) or graph)
    return compiled


def step(shared, state, inputs, noise):
    W, offset, scale = shared
    x, total = state
    x = scale * torch.tanh(x @ W) * inputs["gain"] + offset + noise[0]
    return x, total + x.square().sum(-1)


def arguments(num_steps, scale=0.5):
    torch.manual_seed(0)
    W, offset, gain = torch.randn(2, 2), torch.zeros(2), torch.rand(num_steps, 2)
    W.requires_grad_(), gain.requires_grad_()
    start = torch.randn(3, 2, requires_grad=True)
    noise = [(torch.randn(3, 2),) for _ in range(num_steps)]
    return (W, offset, scale), (start, torch.zeros(3)), {"gain": gain}, noise


def value_and_gradients(loop, shared, state, inputs, noise):
    x, total = loop(shared, state, inputs, noise)
    loss = total.sum() + x.sum()
    return loss, torch.autograd.grad(loss, [shared[0], state[0], inputs["gain"]])


def eager(shared, state, inputs, noise):
    for k, noise_k in enumerate(noise):
        state = step(shared, state, {"gain": inputs["gain"][k]}, noise_k)
    return state


@pytest.mark.parametrize("num_steps", [1, 4])
def test_values_and_gradients_are_those_of_the_recursion(graphs, num_steps):
    loop, given = CompiledLoop(step), arguments(num_steps)
    expected = value_and_gradients(eager, *given)
    for _ in range(2):  # the first call is eager
        torch.testing.assert_close(value_and_gradients(loop, *given), expected)
    assert len(graphs) == 2  # forward with saved tensors, and backward


def test_graphs_serve_any_number_of_steps(graphs):
    loop = CompiledLoop(step)
    for num_steps in (2, 2, 5):
        given = arguments(num_steps)
        torch.testing.assert_close(value_and_gradients(loop, *given), value_and_gradients(eager, *given))
    assert len(graphs) == 2


def test_values_that_are_no_tensors_have_graphs_of_their_own(graphs):
    loop = CompiledLoop(step)
    for scale in (0.5, 0.5, 2.0, 2.0):
        given = arguments(2, scale)
        torch.testing.assert_close(value_and_gradients(loop, *given), value_and_gradients(eager, *given))
    assert len(graphs) == 4


def test_without_gradients_no_tensors_are_saved(graphs):
    loop, given = CompiledLoop(step), arguments(2)
    with torch.no_grad():
        for _ in range(2):
            found = loop(*given)
        torch.testing.assert_close(found, eager(*given))
    (graph,) = graphs
    assert len(graph(*given[0][:2], *given[1], given[2]["gain"][0], given[3][0][0])) == 2


def test_loops_are_one_operation_of_a_recorded_graph(graphs):
    shared, state, inputs, noise = arguments(4)
    loop = CompiledLoop(step)
    loop(shared, state, inputs, noise)
    params = [shared[0], state[0], inputs["gain"]]
    recording = record(lambda: value_and_gradients(loop, shared, state, inputs, noise)[1], params)
    calls = [str(node.target) for node in recording.graph.graph.nodes]
    assert [calls.count(f"pyro_lvgp.loop_{name}.default") for name in ("forward", "backward")] == [1, 1]
    with torch.no_grad():
        *gradients, _ = recording.graph(*params)
    torch.testing.assert_close(tuple(gradients), value_and_gradients(eager, shared, state, inputs, noise)[1])
