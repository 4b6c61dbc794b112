"""Compiled bounds: the bounds they compile, under every guide and bound, when parameters, arguments and conditions change."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, JitTrace_ELBO, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO, TraceTailAdaptive_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

from pyro_lvgp._compile.compilation import compile_graph
from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.infer import Block, BlockCoordinateVI, CompiledELBO, ImportanceWeightedELBO, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF, Matern
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, OffsetNet, PointNet, mask_like_rows
from pyro_lvgp.ops.linalg import safe_cholesky

N, D, Q = 12, 3, 2


pytestmark = pytest.mark.usefixtures("float64")


def counts(missing=True):
    Y = torch.poisson(torch.rand(N, D) + 0.5).clamp_max(1.0)
    if missing:
        Y[2, 1] = torch.nan
        Y[4] = torch.nan
    return Y


def gplvm(guide, likelihood=None, kernel=None):
    model = BayesianGPLVM(N, D, Q, num_inducing=5, likelihood=likelihood, kernel=kernel)
    idx = torch.tensor([2, 4, 5, 9])
    return model, guide(model), (counts()[idx], idx)


def times():
    return torch.rand(N, 1).sort(0).values


def gpvae(kernel=None, encoder=FactorNet):
    model = GPVAE(kernel or RBF(1, lengthscale=0.2, batch_shape=(Q,)), MLP(Q, D, (4,)))
    return model, StructuredGPGuide(model, encoders={"f": encoder(D, Q)}), (times(), counts())


def sparse_gpvae():
    model = SparseGPVAE(RBF(1, lengthscale=0.2, batch_shape=(Q,)), MLP(Q, D, (4,)), torch.linspace(0.0, 1.0, 4)[:, None])
    encoder = OffsetNet(FactorNet(D, 4), 4, input_dim=1, latent_dim=Q, num_nearest=3)
    return model, SparseStructuredGPGuide(model, encoders={"u": encoder}), (times(), counts())


def random_features():
    model = RandomFeatureLVM(N, D, Q, num_frequencies=5)
    return model, RandomFeatureGuide(model), (counts(),)


def users_own(y):
    """Not ours: a function with a random subsample, a positive latent and a parameter of its own."""
    noise = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
    loc = pyro.sample("loc", dist.Normal(torch.zeros(D), 2.0).to_event(1))
    with pyro.plate("rows", N, subsample_size=5) as idx:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(loc, (noise * scale)[..., None]).to_event(1), obs=y[idx])


def correlated(y):
    """Whose correlations torch makes by masks below a diagonal."""
    correlations = pyro.sample("correlations", dist.LKJCholesky(D, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(D), scale_tril=correlations), obs=y)


def correlations(make_guide):
    return correlated, make_guide(correlated), (counts(missing=False),)


def own_model():
    return users_own, AutoNormal(users_own), (counts(missing=False),)


def annealed(**options):
    return lambda model: AutoAnnealedLangevin(model, num_steps=2, **options)


CASES = {
    "mean field": (lambda: gplvm(MeanFieldGuide), MeanFieldELBO()),
    "mean field, drawn": (lambda: gplvm(MeanFieldGuide), MeanFieldELBO(num_samples=3, num_particles=2)),
    "importance-weighted": (lambda: gplvm(MeanFieldGuide, Gaussian(data_dim=D)), ImportanceWeightedELBO(num_samples=3)),
    "Bernoulli": (lambda: gplvm(MeanFieldGuide, Bernoulli()), MeanFieldELBO()),
    "Poisson, Matern": (lambda: gplvm(MeanFieldGuide, Poisson(), Matern(Q)), ImportanceWeightedELBO(num_samples=3)),
    "Student's t": (lambda: gplvm(MeanFieldGuide, StudentT()), MeanFieldELBO()),
    "annealed": (lambda: gplvm(annealed()), MeanFieldELBO()),
    "annealed, traced": (lambda: gplvm(annealed(dynamics="overdamped"), Bernoulli()), ImportanceWeightedELBO(num_samples=2)),
    "Pyro's": (lambda: gplvm(MeanFieldGuide), Trace_ELBO(num_particles=2)),
    "Pyro's, in parallel": (
        lambda: gplvm(MeanFieldGuide),
        Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1),
    ),
    "Pyro's mean field": (lambda: gplvm(annealed()), TraceMeanField_ELBO()),
    "a user's own": (own_model, MeanFieldELBO(local_plate="rows")),
    "a user's own, Pyro's bound": (own_model, TraceMeanField_ELBO()),
    "correlations": (lambda: correlations(MeanFieldGuide), MeanFieldELBO(local_plate="rows")),
    "correlations, annealed": (lambda: correlations(annealed(step_size=0.1)), Trace_ELBO()),
    "GP-VAE": (gpvae, StructuredELBO()),
    "GP-VAE, IndexNet": (lambda: gpvae(encoder=IndexNet), StructuredELBO(corruption=mask_like_rows, rescale=True)),
    "GP-VAE, PointNet": (
        lambda: gpvae(encoder=PointNet),
        StructuredELBO(value="doubly-stochastic", gradient_estimator="score"),
    ),
    "GP-VAE, linear time": (lambda: gpvae(Matern(1, batch_shape=(Q,))), StructuredELBO()),
    "sparse GP-VAE": (sparse_gpvae, StructuredELBO()),
    "random features": (random_features, TraceMeanField_ELBO()),
}


def loss_and_gradients(bound, model, guide, args):
    """With the same random numbers each time, and the gradients by the names of the parameters."""
    torch.manual_seed(3)
    loss = bound.loss_and_grads(model, guide, *args)
    gradients = {}
    for name, param in pyro.get_param_store().named_parameters():
        gradients[name], param.grad = param.grad, None
    return loss, gradients


def assert_same(first, second):
    assert first[0] == pytest.approx(second[0], rel=1e-9)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        other = second[1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            torch.testing.assert_close(other, gradient, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_bound(case):
    make, bound = CASES[case]
    model, guide, args = make()
    compiled = CompiledELBO(bound, backend="eager")
    compiled.loss_and_grads(model, guide, *args)
    for param in pyro.get_param_store().named_parameters():
        param[1].grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(loss_and_gradients(bound, model, guide, args), loss_and_gradients(compiled, model, guide, args))
    # At other parameters and data of the same shape.
    with torch.no_grad():
        for _, param in pyro.get_param_store().named_parameters():
            param += 0.05 * torch.randn_like(param)
    args = (*args[:-1], args[-1].roll(1, 0)) if len(args) == 2 and args[-1].is_floating_point() else args
    assert_same(loss_and_gradients(bound, model, guide, args), loss_and_gradients(compiled, model, guide, args))


def linear(y, scale=1.0):
    """No randomness but that of the data: a loss without noise."""
    loc = pyro.param("loc", lambda: torch.zeros(D))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(loc, scale).to_event(1), obs=y)


def no_latents(y, scale=1.0):
    """A guide."""


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


def test_loss_is_that_of_the_bound_and_svi_sees_the_parameters():
    model, guide, args = gplvm(MeanFieldGuide)
    bound = CompiledELBO(MeanFieldELBO(), backend="eager")
    svi = SVI(model, guide, Adam({"lr": 0.01}), bound)
    svi.step(*args)
    before = {name: param.detach().clone() for name, param in pyro.get_param_store().named_parameters()}
    svi.step(*args)
    moved = {name for name, param in pyro.get_param_store().named_parameters() if not torch.equal(param, before[name])}
    assert moved == before.keys()
    values = []
    for evaluate in (bound.loss, MeanFieldELBO(max_plate_nesting=1).loss, bound.differentiable_loss):
        torch.manual_seed(0)
        values.append(torch.as_tensor(evaluate(model, guide, *args)).item())
    assert values[0] == values[1] == pytest.approx(values[2])


@pytest.mark.parametrize("local", [False, True])
def test_blocks_and_parameters_of_modules_follow_the_eager_path(local):
    """Blocks hold parameters fixed in turn, and parameters of modules need not be in Pyro's store."""
    ends = []
    for wrap in (lambda bound: bound, lambda bound: CompiledELBO(bound, backend="eager")):
        pyro.clear_param_store()
        torch.manual_seed(0)
        with pyro.settings.context(module_local_params=local):
            model, guide, args = gplvm(MeanFieldGuide)
            blocks = [
                Block("latents", sites=["X"], optim=lambda tensors: torch.optim.Adam(tensors, lr=0.01)),
                Block("all else", params=["model.*"], sites=["u"], optim=lambda tensors: torch.optim.Adam(tensors, lr=0.01)),
            ]
            vi = BlockCoordinateVI(model, guide, blocks, loss=wrap(MeanFieldELBO(max_plate_nesting=1)))
            torch.manual_seed(1)
            ends.append([vi.step(*args) for _ in range(3)])
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)


def test_fit_compiles():
    """With what users get by default, the compiler included."""
    Y = torch.randn(6, D)
    ends = []
    for compile in (False, True):
        pyro.clear_param_store()
        history = fit(linear, no_latents, Y, num_steps=5, compile=compile, progress=False)
        ends.append(([*history.losses], pyro.param("loc").tolist()))
    assert ends[1][0] == pytest.approx(ends[0][0])
    assert ends[1][1] == pytest.approx(ends[0][1])


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
    with pytest.warns(UserWarning, match="the compiler 'inductor' errs"):
        assert_same(expected, loss_and_gradients(compiled, model, guide, args))
    assert_same(expected, loss_and_gradients(compiled, model, guide, args))


def test_results_of_a_cuda_graph_are_copied(monkeypatch):
    """Each replay writes its results where those of the last lie."""
    runs = []

    def compile(graph, **_):
        def replay(x):
            runs.append(x)
            return (place.copy_(x), None)

        place = torch.zeros(2)
        return replay

    monkeypatch.setattr(torch, "compile", compile)
    ones = torch.ones(2)
    same = compile_graph(record_pure(lambda x: (x, None), [ones]), [ones], options={"triton.cudagraphs": True})
    assert len(runs) == 3  # the first that replays is compared
    (first, nothing), (second, _) = same(torch.tensor([1.0, 2.0])), same(torch.tensor([3.0, 4.0]))
    assert nothing is None
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("case", ["GP-VAE", "mean field"])
def test_compiled_steps_are_those_not_compiled(case):
    make, bound = CASES[case]
    model, guide, args = make()
    compiled = CompiledELBO(bound)
    compiled.loss_and_grads(model, guide, *args)
    loss_and_gradients(bound, model, guide, args)
    assert_same(loss_and_gradients(bound, model, guide, args), loss_and_gradients(compiled, model, guide, args))
