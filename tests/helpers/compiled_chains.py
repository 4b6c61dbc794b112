"""Compiled against eager chains of the annealed guide: values, gradients, number of graphs, and in a recorded bound."""

from unittest.mock import patch

import pyro
import torch

from pyro_lvgp._compile.compilation import compile_graph
from pyro_lvgp._compile.recording import record
from pyro_lvgp.guides import AutoAnnealedLangevin
from pyro_lvgp.infer import CompiledELBO, MeanFieldELBO, _compiled_loop
from pyro_lvgp.infer._compiled_loop import CompiledLoop
from pyro_lvgp.models import BayesianGPLVM

BOUND = MeanFieldELBO(max_plate_nesting=1)
COMPILED = {}


def compile_once(graph, tensors, **options):
    """The compiled code of an equal graph, if there is one."""
    key = graph.code, *(tensor.shape for tensor in tensors)
    if key not in COMPILED:
        COMPILED[key] = compile_graph(graph, tensors, **options)
    return COMPILED[key]


def new_guide(model, Y, **options):
    pyro.clear_param_store()
    torch.manual_seed(4)
    guide = AutoAnnealedLangevin(model, **options)
    guide._setup_prototype(Y)
    return guide


def value_and_gradients(model, guide, Y):
    torch.manual_seed(5)
    loss = BOUND.differentiable_loss(model, guide, Y)
    return loss, torch.autograd.grad(loss, [*model.parameters(), *guide.parameters()])


def compare(model, Y, num_steps):
    """The number of graphs compiled for a chain, whose first run is not."""
    eager, eager_gradients = value_and_gradients(model, new_guide(model, Y, num_steps=num_steps), Y)
    guide = new_guide(model, Y, num_steps=num_steps, compile=True)
    with patch.object(_compiled_loop, "compile_graph", wraps=compile_once) as compiler:
        for _ in range(2):
            compiled, gradients = value_and_gradients(model, guide, Y)
            assert torch.allclose(compiled, eager, rtol=1e-10), (compiled, eager)
            for a, b in zip(gradients, eager_gradients, strict=True):
                assert torch.allclose(a, b, rtol=1e-7, atol=1e-9), (a, b)
    return compiler.call_count


def assert_draws_without_gradients(model, Y):
    found = []
    for compile in (False, True):
        guide = new_guide(model, Y, num_steps=2, compile=compile)
        for _ in range(2):  # the first run is not compiled
            torch.manual_seed(5)
            draws = guide.sample_posterior(3, Y)["X"]
        found.append(draws)
    torch.testing.assert_close(found[1], found[0])


def operations_of_a_step(model, Y, num_steps):
    """How many make up the bound and its gradients, apart from the draws, and how many of them are chains."""
    guide = new_guide(model, Y, num_steps=num_steps, compile=True)
    value_and_gradients(model, guide, Y)
    graph = record(lambda: value_and_gradients(model, guide, Y)[1], [Y]).graph.graph
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return len(calls), [calls.count(f"pyro_lvgp.loop_{name}.default") for name in ("forward", "backward")]


def assert_part_of_a_recorded_bound(model, Y):
    """Loss and gradients of a recorded bound that holds that of the mean-field base as well."""
    found = []
    for bound in (BOUND, CompiledELBO(BOUND, backend="eager")):
        guide = new_guide(model, Y, num_steps=2, compile=True)
        model.zero_grad()
        with patch.object(_compiled_loop, "compile_graph", compile_once):
            losses = []
            for step in range(3):
                torch.manual_seed(step)
                losses.append(bound.loss_and_grads(model, guide, Y))
        found.append((losses, [parameter.grad for parameter in (*model.parameters(), *guide.parameters())]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def assert_part_of_a_compiled_graph():
    """Gradients of a small loop in a graph that goes through the compiler, which does not see into the loop."""
    params = [torch.rand((), requires_grad=True), torch.rand(2, requires_grad=True), torch.rand(3, 2, requires_grad=True)]
    loop = CompiledLoop(lambda decay, state, inputs, noise: (decay * state[0] + inputs, state[1] + state[0].exp()))

    def gradients():
        decay, start, inputs = params
        return torch.autograd.grad(sum(loop(decay, (start, start), inputs, [(), (), ()])).square().sum(), params)

    with patch.object(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph), torch.no_grad():
        with torch.enable_grad():
            expected = gradients()
            graph = record(gradients, params).graph
        compiled = compile_graph(graph, params)
        assert compiled is not graph
        *found, _ = compiled(*params)
    torch.testing.assert_close(tuple(found), expected)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    Y = torch.randn(8, 3)
    Y[2, 1] = torch.nan
    model = BayesianGPLVM(8, 3, 2, num_inducing=4).initialize(Y)
    assert [compare(model, Y, num_steps) for num_steps in (2, 6)] == [2, 2]
    assert len(COMPILED) == 2
    assert_draws_without_gradients(model, Y)
    short, long = (operations_of_a_step(model, Y, num_steps) for num_steps in (3, 6))
    assert short == long, (short, long)
    assert short[1] == [1, 1], short
    assert_part_of_a_recorded_bound(model, Y)
    assert_part_of_a_compiled_graph()
