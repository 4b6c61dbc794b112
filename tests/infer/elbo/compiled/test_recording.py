"""Graphs of a compiled bound, and arguments that break their assumptions."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import JitTrace_ELBO, RenyiELBO, Trace_ELBO, TraceTailAdaptive_ELBO

from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp.guides import (
    MeanFieldGuide,
)
from pyro_lvgp.infer import CompiledELBO, ImportanceWeightedELBO, MeanFieldELBO
from tests.infer.elbo.compiled._models import D, N, assert_same, gplvm, linear, loss_and_gradients, no_latents

pytestmark = pytest.mark.usefixtures("float64")


def linear_loss_and_gradient(bound, y, *args):
    loss = bound.loss_and_grads(linear, no_latents, y, *args)
    param = pyro.param("loc").unconstrained()
    gradient, param.grad = param.grad, None
    expected = -dist.Normal(param.detach(), *(args or (1.0,))).log_prob(y).sum()
    assert loss == pytest.approx(expected.item())
    torch.testing.assert_close(gradient, (param.detach() - y).sum(0) / (args[0] if args else 1.0) ** 2)


def test_shapes_and_numbers_have_graphs_of_their_own_and_parameters_are_looked_up():
    bound = CompiledELBO(MeanFieldELBO(), backend="eager")
    y = torch.randn(4, D)
    for data, *args in [(y,), (y + 1.0,), (y[:2],), (y[1:3],), (y, 2.0), (y, 2.0), (y, 3.0), (y, 3.0), (y,)]:
        linear_loss_and_gradient(bound, data, *args)
    pyro.get_param_store()["loc"] = torch.ones(D)
    linear_loss_and_gradient(bound, y)
    pyro.clear_param_store()
    linear_loss_and_gradient(bound, y)
    linear_loss_and_gradient(bound, 2.0 * y)


def test_steps_that_break_an_assumption_run_uncompiled_with_a_warning():
    def model(K, y):
        scale = pyro.param("scale", torch.tensor(1.0))
        L = scale * safe_cholesky(K)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=L), obs=y)

    def no_guide(K, y):
        """No latents."""

    bound, y = MeanFieldELBO(), torch.tensor([0.1, 0.2])
    compiled = CompiledELBO(bound, backend="eager")
    for _ in range(2):
        compiled.loss_and_grads(model, no_guide, torch.eye(2), y)
    singular = torch.tensor([[1.0, 1.0 + 1e-7], [1.0 + 1e-7, 1.0]])
    loss_and_gradients(bound, model, no_guide, (singular, y))
    expected = loss_and_gradients(bound, model, no_guide, (singular, y))
    with pytest.warns(UserWarning, match="more jitter"):
        assert_same(expected, loss_and_gradients(compiled, model, no_guide, (singular, y)))
    # A graph recorded where more jitter is needed has it.
    compiled = CompiledELBO(bound, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert_same(expected, loss_and_gradients(compiled, model, no_guide, (singular, y)))


def test_gaps_where_there_were_none_break_an_assumption():
    model, guide, (y, idx) = gplvm(MeanFieldGuide)
    compiled = CompiledELBO(MeanFieldELBO(), backend="eager")
    for _ in range(2):
        compiled.loss_and_grads(model, guide, torch.nan_to_num(y, 0.5), idx)
    with pytest.warns(UserWarning, match="entries are missing that were not"):
        compiled.loss_and_grads(model, guide, y, idx)


def test_what_breaks_an_assumption_often_is_recorded_instead():
    """A graph of a batch with gaps serves batches without."""

    class Counted(MeanFieldELBO):
        calls = 0

        def loss_and_grads(self, *args, **kwargs):
            self.calls += 1
            return super().loss_and_grads(*args, **kwargs)

    model, guide, (gaps, idx) = gplvm(MeanFieldGuide)
    complete, bound, eager = torch.nan_to_num(gaps, 0.5), Counted(), MeanFieldELBO()
    compiled = CompiledELBO(bound, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, y in enumerate([complete, complete, *[gaps] * 12]):
            compiled.loss_and_grads(model, guide, y, idx)
            assert bound.calls == 1 + min(max(number - 1, 0), 9)
    loss_and_gradients(eager, model, guide, (gaps, idx))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for y in (gaps, complete, gaps):
            assert_same(
                loss_and_gradients(eager, model, guide, (y, idx)), loss_and_gradients(compiled, model, guide, (y, idx))
            )
    assert bound.calls == 10


@pytest.mark.parametrize(
    "choose", [lambda y: y if y.sum() > 0.0 else -y, lambda y: y[~torch.isnan(y)], lambda y: y[y.argmax() :]]
)
def test_what_depends_on_values_is_refused_with_the_mend(choose):
    def model(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        y = choose(y)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    bound = CompiledELBO(MeanFieldELBO(), backend="eager")
    bound.loss_and_grads(model, no_latents, torch.ones(3))
    with pytest.raises(ValueError, match=r"do not depend on the values of tensors, got .*torch.where"):
        bound.loss_and_grads(model, no_latents, torch.ones(3))


class Tempered(Trace_ELBO):
    """A user's own, whose loss is not that of its terms."""

    def loss_and_grads(self, *args, **kwargs):
        return 100.0 * super().loss_and_grads(*args, **kwargs)


@pytest.mark.parametrize("bound", [RenyiELBO, TraceTailAdaptive_ELBO, JitTrace_ELBO, Tempered])
def test_other_bounds_are_refused(bound):
    with pytest.raises(TypeError, match=rf"expected MeanFieldELBO, .* got {bound.__name__}; do not compile it"):
        CompiledELBO(bound())


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_cannot_be_told_apart_are_refused():
    model, guide, (y, *_) = gplvm(MeanFieldGuide)
    with pytest.raises(TypeError, match=r"expected tensors, numbers or strings as arguments, got ndarray; use torch"):
        CompiledELBO(MeanFieldELBO(), backend="eager").loss_and_grads(model, guide, y.numpy())


def test_true_and_one_are_two_arguments():
    def model(y, flag):
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("y", dist.Normal(loc, 0.3 if flag is True else 1.0).expand([6]).to_event(1), obs=y)

    y, bound = torch.randn(6), CompiledELBO(Trace_ELBO(), backend="eager")
    losses = [bound.loss_and_grads(model, lambda y, flag: None, y, flag) for flag in (1, 1, True, True, 1, 1)]
    assert losses == pytest.approx(
        [Trace_ELBO().loss(model, lambda y, flag: None, y, flag) for flag in (1, 1, True, True, 1, 1)]
    )


@pytest.mark.parametrize("bound", [Trace_ELBO(), ImportanceWeightedELBO("data", 3, max_plate_nesting=1)])
def test_a_parameter_of_two_names_is_one(bound):
    net, y = torch.nn.Linear(1, 1), torch.randn(N, 1)

    def model(y):
        pyro.module("decoder", net)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(net(z), 1.0).to_event(1), obs=y)

    def guide(y):
        pyro.module("encoder", net)
        with pyro.plate("data", len(y)):
            pyro.sample("z", dist.Normal(net(y), 1.0).to_event(1))

    compiled = CompiledELBO(bound, backend="eager")
    for _ in range(2):
        compiled.loss_and_grads(model, guide, y)
    loss_and_gradients(bound, model, guide, (y,))
    assert_same(loss_and_gradients(bound, model, guide, (y,)), loss_and_gradients(compiled, model, guide, (y,)))


def test_one_tensor_in_two_places_at_the_recording_can_be_two_later():
    x = torch.tensor([1.0, 2.0, 4.0])

    def model(a, b):
        slope = pyro.param("slope", torch.tensor(0.5))
        pyro.sample("b", dist.Normal(slope * a + x.mean(), 0.5).to_event(1), obs=b)

    def no_guide(a, b):
        """No latents."""

    bound, compiled = Trace_ELBO(), CompiledELBO(Trace_ELBO(), backend="eager")
    for _ in range(2):
        compiled.loss_and_grads(model, no_guide, x, x)
    loss_and_gradients(bound, model, no_guide, (x, x))
    for args in [(x, x), (x, -x), (x + 10.0, x)]:
        assert_same(loss_and_gradients(bound, model, no_guide, args), loss_and_gradients(compiled, model, no_guide, args))


def test_a_compiler_that_errs_is_found_out(monkeypatch):
    def compile(graph, **options):
        return lambda *inputs: tuple(1.1 * x if x is not None and x.is_floating_point() else x for x in graph(*inputs))

    monkeypatch.setattr(torch, "compile", compile)
    model, guide, args = gplvm(MeanFieldGuide)
    bound, compiled = MeanFieldELBO(), CompiledELBO(MeanFieldELBO())
    compiled.loss_and_grads(model, guide, *args)
    loss_and_gradients(bound, model, guide, args)
    expected = loss_and_gradients(bound, model, guide, args)
    with pytest.warns(UserWarning, match="results compiled by backend 'inductor' differ"):
        assert_same(expected, loss_and_gradients(compiled, model, guide, args))
    assert_same(expected, loss_and_gradients(compiled, model, guide, args))
