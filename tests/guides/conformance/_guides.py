"""Every guide and the models that it serves.  A new guide joins by a line in GUIDES."""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    MeanFieldGuide,
    RandomFeatureGuide,
    SparseStructuredGPGuide,
    StructuredGPGuide,
)
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, FactorNet, NeighbourNet, OffsetNet, ZeroImputation


class Problem(NamedTuple):
    """A model, its arguments, and what guides and checks must know about it."""

    model: Callable[..., Any]
    args: tuple
    vector: str  # a vector-valued site
    nesting: int  # max_plate_nesting
    locals: tuple[str, ...] = ()  # sites in the plate over data
    plates: Callable[..., Any] | None = None  # create_plates
    batch: Callable[[Tensor], tuple] | None = None  # arguments for some rows
    local: Mapping[str, Any] = MappingProxyType({})  # to anneal the sites in the plate
    joint: Mapping[str, Any] = MappingProxyType({})  # to anneal all sites


def global_only(dtype):
    """Sites that are scalars, vectors and matrices, on the real line and not."""

    def model(y):
        scale = pyro.sample("noise.scale", dist.LogNormal(y.new_zeros(()), 1.0))
        weights = pyro.sample("weights", dist.Dirichlet(y.new_ones(3)))
        rate = pyro.sample("rate", dist.Beta(y.new_tensor(2.0), y.new_tensor(3.0)))
        loading = pyro.sample("loading", dist.Normal(y.new_zeros(2, 3), 1.0).to_event(2))
        loc = (rate[..., None] * weights + loading.sum(-2))[..., None, :] + torch.zeros_like(y)
        pyro.sample("y", dist.Normal(loc, scale[..., None, None]).to_event(2), obs=y)

    return Problem(model, (torch.randn(4, 3, dtype=dtype) + 1.0,), "weights", 0)


def data_plate(num_data, y, idx=None):
    return pyro.plate("data", num_data, subsample=idx, dim=-1)


def local_and_global(dtype, num_data=6):
    """Global sites in a plate and in none; local ones in a subsampled plate, alone and crossed with the other plate."""

    plates = partial(data_plate, num_data)

    def model(y, idx=None):
        scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()), 0.5))
        columns = pyro.plate("columns", 3, dim=-2)
        with columns:
            loading = pyro.sample("loading", dist.Normal(y.new_zeros(2), 1.0).to_event(1))
        with plates(y, idx):
            x = pyro.sample("x", dist.MultivariateNormal(y.new_zeros(2), torch.eye(2).to(y)))
            with columns:
                exposure = pyro.sample("exposure", dist.Beta(y.new_tensor(2.0), y.new_tensor(2.0)))
                pyro.sample("y", dist.Poisson(scale * exposure * (loading * x).sum(-1).exp()), obs=y)

    y = torch.poisson(torch.full((3, num_data), 2.0, dtype=dtype))
    local = {"local_plate": "data"}
    return Problem(model, (y,), "x", 2, ("x", "exposure"), plates, lambda idx: (y[:, idx], idx), local)


def gplvm(dtype, num_data=6):
    """Ours, whose score is a pure function; with missing data."""
    Y = torch.randn(num_data, 4, dtype=dtype)
    Y[torch.arange(3), torch.arange(3)] = torch.nan
    model = BayesianGPLVM(num_data, 4, 2, num_inducing=3).to(dtype).initialize(Y)
    return Problem(model, (Y,), "X", 1, ("X",), None, lambda idx: (Y[idx], idx), joint={"sites": ["u", "X"]})


def partly_observed(dtype, *series):
    """Times and outputs, of one point only one output."""
    x, y = torch.linspace(0.0, 1.0, 5, dtype=dtype)[:, None].expand(*series, 5, 1), torch.randn(*series, 5, 3, dtype=dtype)
    y[..., 0, 1:], y[..., 3, 0] = torch.nan, torch.nan
    return x, y


def gpvae(dtype, *series, **options):
    model = GPVAE(RBF(1, lengthscale=0.3, batch_shape=(2,)), MLP(2 + options.get("independent_dim", 0), 3, [4]), **options)
    return Problem(model.to(dtype), partly_observed(dtype, *series), "f", 1 + len(series))


def sparse_gpvae(dtype, *series, **options):
    kernel, Z = RBF(1, lengthscale=0.3, batch_shape=(2,)), torch.tensor([[0.0], [0.4], [0.9]])
    model = SparseGPVAE(kernel, MLP(2 + options.get("independent_dim", 0), 3, [4]), Z, **options)
    return Problem(model.to(dtype), partly_observed(dtype, *series), "u", 1 + len(series))


def several_series(make, sites, dtype, num_data=6):
    """With latents that are independent from point to point beside the processes."""
    problem = make(dtype, num_data, independent_dim=1, num_data=num_data)
    x, y = problem.args
    return problem._replace(locals=sites, batch=lambda idx: (x[idx], y[idx], idx))


def rflvm(dtype, num_data=6):
    """Random features, with missing data."""
    Y = torch.randn(num_data, 4, dtype=dtype)
    Y[torch.arange(3), torch.arange(3)] = torch.nan
    model = RandomFeatureLVM(num_data, 4, 2, num_frequencies=3, num_components=2).to(dtype).initialize(Y)
    return Problem(model, (Y,), "X", 1, ("X",), None, lambda idx: (Y[idx], idx))


MODELS = {
    "global": global_only,
    "local": local_and_global,
    "gplvm": gplvm,
    "gp": gpvae,
    "gps": partial(several_series, gpvae, ("f", "w")),
    "sparse-gp": sparse_gpvae,
    "sparse-gps": partial(several_series, sparse_gpvae, ("u", "f", "w")),
    "rflvm": rflvm,
}


class Entry(NamedTuple):
    """A guide, and the models for which it is."""

    make: Callable[[Problem], AutoGuide]
    models: str
    mini_batches: bool = True
    exact_gradient: bool = True
    needs_all_data: bool = False  # to draw for some rows


def mean_field(p, covariance="diagonal", **options):
    return MeanFieldGuide(p.model, covariance={p.vector: covariance}, create_plates=p.plates, **options)


def amortised(p, covariance="diagonal"):
    encoder = ZeroImputation(4, 2, [8], covariance=covariance).to(p.args[0].dtype)
    return mean_field(p, covariance, encoders={"X": encoder})


def full(p):
    return mean_field(p, "full")


def joint(base=mean_field, **options):
    return lambda p: AutoAnnealedLangevin(p.model, base_guide=base(p), num_steps=2, **p.joint, **options)


def local(base=mean_field, **options):
    return lambda p: AutoAnnealedLangevin(p.model, base_guide=base(p), num_steps=2, **p.local, **options)


def local_given_globals(p):
    return local(global_guide=MeanFieldGuide(poutine.block(p.model, hide=p.locals)))(p)


def structured(p):
    return StructuredGPGuide(p.model, encoders={"f": FactorNet(3, 2, [4]).to(p.args[0].dtype)})


def structured_unamortised(p):
    return StructuredGPGuide(p.model)


def structured_fallback(p):
    """Mean-field at all sites."""
    return StructuredGPGuide(p.model, encoders={}, create_plates=p.plates)


def sparse(p):
    """Projected sites."""
    return SparseStructuredGPGuide(p.model, encoders={"u": FactorNet(3, 2, [4]).to(p.args[0].dtype)})


def sparse_nearest(p):
    encoder = OffsetNet(ZeroImputation(3, 4), 4, input_dim=1, latent_dim=2, num_nearest=2)
    return SparseStructuredGPGuide(p.model, encoders={"u": encoder.to(p.args[0].dtype)})


def sparse_neighbours(p):
    encoder = NeighbourNet(ZeroImputation(3, 2), input_dim=1, latent_dim=2, num_nearest=2)
    nn.init.normal_(encoder.net[-1].weight)  # which starts at 0, where those before it have no gradient
    return SparseStructuredGPGuide(p.model, encoders={"u": encoder.to(p.args[0].dtype)})


def sparse_unamortised(p):
    return SparseStructuredGPGuide(p.model)


def random_features(p, **options):
    return RandomFeatureGuide(p.model, **options)


def random_features_amortised(p):
    return random_features(p, weights="shared", encoders={"X": ZeroImputation(4, 2, [8]).to(p.args[0].dtype)})


DETACHED = {"annealing_schedule": "sigmoid", "learn_step_size": False, "differentiate_score": False}
GUIDES = {
    "mean-field": Entry(mean_field, "global local gplvm"),
    "mean-field-full": Entry(full, "global local gplvm"),
    "mean-field-amortised": Entry(amortised, "gplvm"),
    "annealed-joint": Entry(joint(), "global local gplvm", mini_batches=False),
    "annealed-joint-overdamped": Entry(joint(dynamics="overdamped"), "global local", mini_batches=False),
    "annealed-joint-full": Entry(joint(full), "global", mini_batches=False),
    "annealed-local": Entry(local(), "local gplvm"),
    "annealed-local-overdamped": Entry(local(dynamics="overdamped"), "local gplvm"),
    "annealed-local-full": Entry(local(full), "local gplvm"),
    "annealed-local-amortised": Entry(local(amortised), "gplvm"),
    "annealed-local-traced": Entry(lambda p: local(surrogate_model=p.model)(p), "gplvm"),
    "annealed-local-detached": Entry(local(**DETACHED), "local gplvm", exact_gradient=False),
    "annealed-local-global-guide": Entry(local_given_globals, "local"),
    "structured": Entry(structured, "gp gps"),
    "structured-unamortised": Entry(structured_unamortised, "gps"),
    "structured-fallback": Entry(structured_fallback, "global local"),
    "sparse": Entry(sparse, "sparse-gp sparse-gps"),
    "sparse-nearest": Entry(sparse_nearest, "sparse-gp sparse-gps"),
    "sparse-neighbours": Entry(sparse_neighbours, "sparse-gps"),
    "sparse-unamortised": Entry(sparse_unamortised, "sparse-gps"),
    # Gradients of Gammas, Betas and mixtures are implicit: their draws do not move with a change of parameters.
    "random-feature": Entry(random_features, "rflvm", exact_gradient=False, needs_all_data=True),
    "random-feature-gaussian": Entry(
        partial(random_features, frequencies="gaussian"), "rflvm", exact_gradient=False, needs_all_data=True
    ),
    "random-feature-explicit": Entry(partial(random_features, weights="explicit"), "rflvm", exact_gradient=False),
    "random-feature-shared-amortised": Entry(random_features_amortised, "rflvm", exact_gradient=False),
}
PAIRS = [(guide, model) for guide, entry in GUIDES.items() for model in entry.models.split()]
every_pair = pytest.mark.parametrize(("guide_id", "model_id"), PAIRS)


def pairs_where(condition):
    return pytest.mark.parametrize(("guide_id", "model_id"), [pair for pair in PAIRS if condition(GUIDES[pair[0]], pair[1])])


def new(guide_id, model_id, dtype=torch.float32):
    """A model and its guide, after the guide's first call."""
    pyro.set_rng_seed(0)
    problem = MODELS[model_id](dtype)
    guide = GUIDES[guide_id].make(problem)
    guide(*problem.args)
    pyro.set_rng_seed(1)
    return problem, guide


def start(guide_id, model_id, dtype=torch.float32):
    """The same, shared by tests: each finds the parameters and buffers as the first call left them."""
    problem, guide, initial = _shared(guide_id, model_id, dtype)
    for module, values in initial:
        module.zero_grad()
        for name, value in tensors(module).items():
            value.copy_(values[name])
    pyro.set_rng_seed(1)
    return problem, guide


@cache
def _shared(guide_id, model_id, dtype):
    problem, guide = new(guide_id, model_id, dtype)
    modules = [module for module in (problem.model, guide) if isinstance(module, nn.Module)]
    pyro.clear_param_store()
    return problem, guide, [(module, {name: x.clone() for name, x in tensors(module).items()}) for module in modules]


def tensors(module):
    """The state of a module without what it keeps beside parameters and buffers."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def latent_sites(problem):
    trace = poutine.trace(problem.model).get_trace(*problem.args)
    return dict(prune_subsample_sites(trace).iter_stochastic_nodes())


def draw(guide, args, seed=2):
    pyro.set_rng_seed(seed)
    return guide(*args)


def loss_at(problem, guide):
    pyro.set_rng_seed(2)
    return Trace_ELBO().differentiable_loss(problem.model, guide, *problem.args)


def estimate(loss, num):
    """Mean and squared standard error."""
    losses = torch.tensor([loss() for _ in range(num)], dtype=torch.float64)
    return losses.mean().item(), losses.var().item() / num


def agree(a, b):
    return abs(a[0] - b[0]) < 4.0 * math.sqrt(a[1] + b[1])


def vectorised(problem, bound=Trace_ELBO, num_particles=100):
    return bound(num_particles=num_particles, vectorize_particles=True, max_plate_nesting=problem.nesting)


def moved(problem, guide):
    """Draws of the guide after its parameters left their initial values."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return draw(guide, problem.args)
