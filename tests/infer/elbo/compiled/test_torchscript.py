"""Graphs without Python: the same fits as through Pyro."""

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import Callback, Checkpoint, CompiledELBO, ImportanceWeightedELBO, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.infer._compile_setting import uses_graph
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import StudentT
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import MLP, IndexNet

N, D, Q = 20, 3, 2


def gplvm(Y, **options):
    return BayesianGPLVM(N, D, Q, num_inducing=5, **options).initialize(Y)


def gpvae(Y):
    model = GPVAE(Matern(1, 1.5, batch_shape=(Q,)), MLP(Q, D))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, Q)})
    return model, guide, (torch.linspace(0.0, 1.0, N)[:, None], Y), StructuredELBO()


def convolutions(Y):
    """With an operation that TorchScript cannot trace, the gradient of a convolution."""
    decoder = nn.Sequential(nn.Linear(Q, D), nn.Unflatten(-1, (1, D)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten(-2))
    model = GPVAE(Matern(1, 1.5, batch_shape=(Q,)), decoder)
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(D, Q)})
    return model, guide, (torch.linspace(0.0, 1.0, N)[:, None], Y), StructuredELBO()


def random_features(Y):
    model = RandomFeatureLVM(N, D, Q).initialize(Y)
    return model, RandomFeatureGuide(model), (Y,), Trace_ELBO()


CASES = {
    "mean field": lambda Y: (model := gplvm(Y), MeanFieldGuide(model), (Y,), MeanFieldELBO()),
    "Trace_ELBO": lambda Y: (model := gplvm(Y), MeanFieldGuide(model), (Y,), Trace_ELBO()),
    "importance weighted": lambda Y: (model := gplvm(Y), MeanFieldGuide(model), (Y,), ImportanceWeightedELBO(num_samples=3)),
    "annealed": lambda Y: (model := gplvm(Y), AutoAnnealedLangevin(model, num_steps=2), (Y,), MeanFieldELBO()),
    "traced chain": lambda Y: (
        model := gplvm(Y, likelihood=StudentT()),
        AutoAnnealedLangevin(model, num_steps=2, dynamics="overdamped"),
        (Y,),
        Trace_ELBO(),
    ),
    "random features": random_features,
    "GP-VAE": gpvae,
    "convolutions": convolutions,
}


def data(*, missing=False):
    torch.manual_seed(0)
    Y = torch.randn(N, D)
    if missing:
        Y[torch.rand(N, D) < 0.2] = torch.nan
    return Y


def losses_and_parameters(make, Y, **options):
    pyro.clear_param_store()
    torch.manual_seed(1)
    model, guide, args, loss = make(Y)
    history = fit(model, guide, *args, loss=loss, num_steps=5, progress=False, **options)
    return history.losses, [x.detach().clone() for part in (model, guide) for x in part.parameters()]


@pytest.mark.parametrize(("name", "batch_size"), [*((name, None) for name in CASES), ("mean field", 10), ("annealed", 10)])
def test_fits_are_those_through_pyro_to_the_last_bit(name, batch_size):
    eager, graph = (
        losses_and_parameters(CASES[name], data(), batch_size=batch_size, compile=compile)
        for compile in (False, "torchscript")
    )
    assert graph[0] == eager[0]
    for one, other in zip(graph[1], eager[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["mean field", "annealed", "GP-VAE"])
def test_fits_with_missing_entries_are_those_through_pyro_up_to_rounding(name):
    eager, graph = (
        losses_and_parameters(CASES[name], data(missing=True), compile=compile) for compile in (False, "torchscript")
    )
    for one, other in zip(graph[1], eager[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_long_fits_of_own_models_run_as_graphs_and_others_do_not():
    Y = data()
    model, guide, args, loss = CASES["mean field"](Y)
    parts = [model, guide, loss, None]
    assert uses_graph("auto", 1000, parts, args)
    assert not uses_graph("auto", 999, parts, args)
    assert not uses_graph("auto", 1000, [*parts, Callback, type("Own", (Callback,), {"__module__": "own"})()], args)
    assert not uses_graph("auto", 1000, [type("Own", (BayesianGPLVM,), {"__module__": "own"})(N, D, Q, num_inducing=5)], args)
    assert not uses_graph("auto", 1000, [MeanFieldGuide(model, create_plates=lambda *args: None)], args)
    assert not uses_graph("auto", 1000, [*parts, guide.blocks() if hasattr(guide, "blocks") else []], args)
    assert uses_graph("torchscript", 1, parts, args)
    assert not uses_graph(False, 1000, parts, args)
    for name in CASES:
        model, guide, args, loss = CASES[name](Y)
        assert uses_graph("auto", 1000, [model, guide, loss, None, Checkpoint("unused")], args), name


def test_fits_go_on_from_a_checkpoint_with_the_same_results(tmp_path):
    Y, results = data(missing=True), []
    for steps in ([8], [5, 8]):
        path = tmp_path / f"{len(steps)}.ckpt"
        for num_steps in steps:
            pyro.clear_param_store()
            torch.manual_seed(1)
            model, guide, args, loss = CASES["annealed"](Y)
            options = {"callbacks": [Checkpoint(path)], "compile": "torchscript", "progress": False}
            history = fit(model, guide, *args, loss=loss, num_steps=num_steps, **options)
        results.append((history.losses, [x.detach().clone() for part in (model, guide) for x in part.parameters()]))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(one, other)


def test_large_losses_run_eagerly():
    Y = data()
    model, guide, args, loss = CASES["mean field"](Y)
    bound = CompiledELBO(loss, backend="torchscript", max_operations=10)
    bound._compile = None  # is not called
    fit(model, guide, *args, loss=bound, num_steps=3, progress=False, compile=False)


def test_graphs_see_new_values_of_tensors_that_are_no_arguments():
    offset = torch.zeros(())

    def model(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("y", pyro.distributions.Normal(loc + offset, 1.0).expand([len(y)]).to_event(1), obs=y)

    bound, y = CompiledELBO(MeanFieldELBO(), backend="torchscript"), torch.zeros(3)
    for value in (0.0, 0.0, 0.0, 2.0):
        offset.fill_(value)
        loss = bound.loss_and_grads(model, lambda y: None, y)
    expected = -pyro.distributions.Normal(2.0, 1.0).log_prob(y).sum()
    torch.testing.assert_close(torch.tensor(loss), expected)


def test_conditions_that_do_not_hold_run_eagerly_without_a_warning(recwarn):
    Y = data(missing=True)
    complete, loss = torch.nan_to_num(Y), MeanFieldELBO()
    model = gplvm(complete)
    guide = MeanFieldGuide(model, init_scale=1e-6)  # without much noise
    bound = CompiledELBO(loss, backend="torchscript")
    values = [bound.loss_and_grads(model, guide, y) for y in (complete, complete, complete, Y)]
    assert values[-1] == pytest.approx(loss.loss(model, guide, Y), rel=1e-4)
    assert values[-1] != pytest.approx(values[0], rel=1e-2)
    assert not recwarn


def test_unknown_settings_are_refused():
    Y = data()
    model, guide, args, loss = CASES["mean field"](Y)
    with pytest.raises((TypeError, ValueError), match="expected compile to be"):  # of type checks, or without them
        fit(model, guide, *args, loss=loss, compile="fast", progress=False)
