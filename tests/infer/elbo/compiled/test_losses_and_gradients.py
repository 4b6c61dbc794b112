"""Losses and gradients of compiled bounds, under every guide and bound."""

import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
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
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, LowRankGaussian, Poisson, StudentT
from pyro_lvgp.models import GPVAE, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, IndexNet, OffsetNet, PointNet, mask_like_rows
from tests.infer.elbo.compiled._models import D, N, Q, assert_same, counts, gplvm, linear, loss_and_gradients, no_latents

pytestmark = pytest.mark.usefixtures("float64")


def times():
    return torch.rand(N, 1).sort(0).values


def gpvae(kernel=None, encoder=FactorNet, **options):
    model = GPVAE(kernel or RBF(1, lengthscale=0.2, batch_shape=(Q,)), MLP(Q, D, (4,)))
    return model, StructuredGPGuide(model, encoders={"f": encoder(D, Q)}, **options), (times(), counts())


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
    "low-rank residual": (lambda: gplvm(MeanFieldGuide, LowRankGaussian(2, D)), ImportanceWeightedELBO(num_samples=3)),
    "low-rank residual, annealed": (lambda: gplvm(annealed(), LowRankGaussian(1, D)), MeanFieldELBO()),
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
    "GP-VAE, updated sites": (lambda: gpvae(encoder=IndexNet, num_site_updates=2), StructuredELBO()),
    "GP-VAE, linear time": (lambda: gpvae(Matern(1, batch_shape=(Q,))), StructuredELBO()),
    "sparse GP-VAE": (sparse_gpvae, StructuredELBO()),
    "random features": (random_features, TraceMeanField_ELBO()),
}


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
            adam = partial(torch.optim.Adam, lr=0.01)
            blocks = [
                Block("latents", sites=["X"], optimizer=adam),
                Block("all else", params=["model.*"], sites=["u"], optimizer=adam),
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


def test_compiled_steps_are_those_not_compiled():
    model, guide, args = gpvae()
    bound = StructuredELBO()
    compiled = CompiledELBO(bound)
    compiled.loss_and_grads(model, guide, *args)
    loss_and_gradients(bound, model, guide, args)
    assert_same(loss_and_gradients(bound, model, guide, args), loss_and_gradients(compiled, model, guide, args))
