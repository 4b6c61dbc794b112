"""What every guide must do, on models with sites of all kinds.  A new guide joins by a line in GUIDES."""

import math
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.distributions.transforms import biject_to
from pyro.infer import SVI, Importance, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.infer.importance import psis_diagnostic, vectorized_importance_weights
from pyro.optim import Adam
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pyro_lvgp.diagnostics import to_arviz
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
WITHOUT_MINI_BATCHES = {"global", "gp", "sparse-gp"}


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


def start(guide_id, model_id, dtype=torch.float32):
    """A model and its guide, after the guide's first call."""
    problem = MODELS[model_id](dtype)
    guide = GUIDES[guide_id].make(problem)
    guide(*problem.args)
    pyro.set_rng_seed(1)
    return problem, guide


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


def parameters(problem, guide):
    """Name, unconstrained value and constraint of every parameter in use, of guide and model."""
    for module in (guide, problem.model):
        for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
            for name, (constraint, _) in getattr(part, "_pyro_params", {}).items():
                # What a global guide draws, the base guide need not.
                given = path.startswith("base_guide.") and guide.global_guide is not None and name not in guide.annealed
                if not given:
                    yield f"{path}.{name}", getattr(part, f"{name}_unconstrained"), constraint


@every_pair
def test_sites_match_the_model_s(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    trace = poutine.trace(guide).get_trace(*problem.args)
    replayed = poutine.trace(poutine.replay(problem.model, trace)).get_trace(*problem.args)
    trace.compute_log_prob()
    replayed.compute_log_prob()
    for name in latent_sites(problem):
        ours, theirs = trace.nodes[name], replayed.nodes[name]
        assert ours["fn"].batch_shape == theirs["fn"].batch_shape
        assert ours["fn"].event_shape == theirs["fn"].event_shape
        assert {f.name for f in ours["cond_indep_stack"]} == {f.name for f in theirs["cond_indep_stack"]}
        assert torch.equal(ours["value"], theirs["value"])
        assert theirs["fn"].support.check(ours["value"]).all()
        assert ours["log_prob"].shape == theirs["log_prob"].shape
        assert ours["log_prob"].isfinite().all()
        assert theirs["log_prob"].isfinite().all()


@every_pair
def test_all_bounds_estimate_one_number(guide_id, model_id):
    """Vectorised or not, with an analytic KL or without."""
    problem, guide = start(guide_id, model_id)
    estimates = []
    for bound in (Trace_ELBO, TraceMeanField_ELBO):
        assert math.isfinite(vectorised(problem, bound, 3).loss(problem.model, guide, *problem.args))
        for elbo, num in ((vectorised(problem, bound), 12), (bound(), 30)):
            estimates.append(estimate(lambda elbo=elbo: elbo.loss(problem.model, guide, *problem.args), num))
    for other in estimates[1:]:
        assert agree(estimates[0], other), estimates


def tilted(y, observed, level):
    """A factor, a mask and a scale in the plate; and priors as narrow as guides start, so that weights are tame."""
    pyro.sample("shift", dist.LogNormal(1.0, 0.1))
    with pyro.plate("data", 3, dim=-1):
        x = pyro.sample("x", dist.LogNormal(torch.ones(2), 0.1).to_event(1))
        pyro.factor("tilt", level - 10.0 * (x.log() - 1.0).square().sum(-1))
        with poutine.mask(mask=observed), poutine.scale(scale=2.0):
            pyro.sample("y", dist.Normal(x.log() - 1.0, 0.2).to_event(1), obs=y)


def tilted_by_hand(y, observed, level):
    """The same, in unconstrained coordinates and without handlers."""
    pyro.sample("shift", dist.Normal(1.0, 0.1))
    with pyro.plate("data", 3, dim=-1):
        h = pyro.sample("x", dist.Normal(torch.ones(2), 0.1).to_event(1)) - 1.0
        log_likelihood = dist.Normal(h, 0.2).log_prob(y).sum(-1)
        pyro.factor("all", level - 10.0 * h.square().sum(-1) + 2.0 * torch.where(observed, log_likelihood, 0.0))


def log_evidence(y, observed, level):
    """Log of ∫ N(h; 0, 0.1²) exp(−10 h²) N(y; h, 0.2²)^2o dh, entry by entry."""
    o = observed[:, None].double()
    precision = 100.0 + 20.0 + 50.0 * o
    likelihood = -math.log(2.0 * math.pi * 0.04) - 25.0 * y.square() + (50.0 * y).square() / (2.0 * precision)
    return 3.0 * level + (0.5 * (100.0 / precision).log() + o * likelihood).sum()


@pytest.mark.parametrize(
    "guide_id", [guide for guide, entry in GUIDES.items() if {"global", "local"} & {*entry.models.split()}]
)
def test_factor_mask_and_scale(guide_id):
    args = (0.1 * torch.randn(3, 2), torch.tensor([True, False, True]), torch.tensor(1.0))
    problems = [Problem(model, args, "x", 1, ("x",), local={"local_plate": "data"}) for model in (tilted, tilted_by_hand)]
    with pyro.settings.context(module_local_params=True):
        guide, by_hand = (GUIDES[guide_id].make(problem) for problem in problems)
        for g in (guide, by_hand):
            g(*args)
        by_hand.load_state_dict(guide.state_dict())
        for name, value in draw(guide, args).items():
            torch.testing.assert_close(value.log(), draw(by_hand, args)[name])
        loss = loss_at(problems[0], guide)
        torch.testing.assert_close(loss, loss_at(problems[1], by_hand))
        higher = problems[0]._replace(args=(*args[:2], args[2] + 1.0))
        torch.testing.assert_close(loss_at(higher, guide), loss - 3.0)
        with poutine.scale(scale=0.5):
            torch.testing.assert_close(loss_at(problems[0], guide), 0.5 * loss)
        with torch.no_grad():
            log_w = vectorized_importance_weights(tilted, guide, *args, num_samples=4000, max_plate_nesting=1)[0].double()
        weights = (log_w - log_evidence(*args)).exp()
        assert weights.std() < 2.0
        assert weights.mean() == pytest.approx(1.0, abs=4.0 * weights.std().item() / 4000**0.5)


@every_pair
def test_every_parameter_gets_a_gradient(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    loss_at(problem, guide).backward()
    found = list(parameters(problem, guide))
    assert found
    for name, parameter, constraint in found:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        used = torch.ones_like(parameter)
        if constraint in (constraints.lower_cholesky, constraints.positive_definite):
            used = used.tril()
        assert torch.equal(parameter.grad != 0.0, used.bool()), name


@pairs_where(lambda entry, model: entry.exact_gradient)
def test_gradient_is_the_slope_of_the_loss(guide_id, model_id):
    problem, guide = start(guide_id, model_id, torch.float64)
    values = [value for _, value, _ in parameters(problem, guide)]
    slopes = parameters_to_vector(torch.autograd.grad(loss_at(problem, guide), values))
    start_at = parameters_to_vector(values).detach()
    direction, ends = torch.randn_like(start_at), []
    for step in (-1e-5, 1e-5):
        vector_to_parameters(start_at + step * direction, values)
        ends.append(loss_at(problem, guide).detach())
    torch.testing.assert_close(slopes @ direction, (ends[1] - ends[0]) / 2e-5, rtol=1e-5, atol=1e-5)


@every_pair
def test_median_and_quantiles(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    draws = {"num_samples": 10, "seed": 3} if isinstance(guide, AutoAnnealedLangevin) else {}
    state = torch.get_rng_state()
    median = guide.median(*problem.args, **draws)
    quantiles = guide.quantiles([0.1, 0.5, 0.9], *problem.args, **draws)
    assert torch.equal(state, torch.get_rng_state())
    latents = latent_sites(problem)
    assert set(median) == set(quantiles) == set(latents)
    for name, site in latents.items():
        support = site["fn"].support
        assert quantiles[name].shape == (3, *site["value"].shape)
        torch.testing.assert_close(quantiles[name][1], median[name])
        assert support.check(quantiles[name]).all(), name
        # Coordinates of a simplex have no order of their own.
        assert (biject_to(support).inv(quantiles[name]).diff(dim=0) > 0.0).all(), name
    conditioned = poutine.trace(poutine.condition(problem.model, median)).get_trace(*problem.args)
    assert conditioned.log_prob_sum().isfinite()


@pytest.mark.parametrize(
    ("model_id", "make", "message"),
    [
        ("local", lambda p: mean_field(p._replace(vector="z")), "one of .*'x'.*, got 'z'"),
        ("gplvm", lambda p: AutoAnnealedLangevin(p.model, sites=["z"]), r"among \['X', 'u'\], got \['z'\]"),
        ("gp", lambda p: StructuredGPGuide(p.model, encoders={"z": None}), "one of .*'f'.*, got 'z'"),
        (
            "rflvm",
            lambda p: random_features(p, weights="shared", encoders={"X": ZeroImputation(4, 3, [8])}),
            "loc and scale of shape",
        ),
    ],
)
def test_a_first_call_that_fails_is_made_again(model_id, make, message):
    problem = MODELS[model_id](torch.float32)
    guide = make(problem)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            guide(*problem.args)


def moved(problem, guide):
    """Draws of the guide after its parameters left their initial values."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return draw(guide, problem.args)


def assert_draws(guide, args, expected):
    values = draw(guide, args)
    assert set(values) == set(expected)
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


@every_pair
def test_state_dict(guide_id, model_id):
    with pyro.settings.context(module_local_params=True):
        problem, guide = start(guide_id, model_id)
        expected = moved(problem, guide)
        other = GUIDES[guide_id].make(problem)
        other(*problem.args)
        other.load_state_dict(guide.state_dict())
        assert_draws(other, problem.args, expected)


@every_pair
@pytest.mark.filterwarnings("ignore:.*from Pyro's param store")  # which they are meant to be
def test_param_store(guide_id, model_id, tmp_path):
    problem, guide = start(guide_id, model_id)
    expected = moved(problem, guide)
    pyro.get_param_store().save(tmp_path / "params")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "params")
    other = GUIDES[guide_id].make(problem)
    other(*problem.args)
    assert_draws(other, problem.args, expected)


@every_pair
def test_warns_when_a_second_guide_would_share_parameters(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    other = GUIDES[guide_id].make(problem)
    with pytest.warns(UserWarning, match=f"{type(guide).__name__} takes the values.*module_local_params") as caught:
        other(*problem.args)
    assert len(caught) == 1


@every_pair
def test_pickle(guide_id, model_id):
    """A copy has the parameters, not, as Pyro has it, the model; the guide itself goes on as before."""
    problem, guide = start(guide_id, model_id)
    expected = moved(problem, guide)
    state = pickle.loads(pickle.dumps(guide)).state_dict()
    assert set(state) == set(guide.state_dict())
    for name, value in guide.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0.0, atol=0.0, equal_nan=True)
    assert_draws(guide, problem.args, expected)
    if not isinstance(guide, MeanFieldGuide):
        with pytest.raises(RuntimeError, match=f"a guide with its model, got a copied or unpickled {type(guide).__name__}"):
            pickle.loads(pickle.dumps(guide))(*problem.args)


@pairs_where(lambda entry, model: entry.mini_batches and model not in WITHOUT_MINI_BATCHES)
def test_mini_batches_average_to_the_full_bound(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    batches = [problem.batch(idx) for idx in torch.randperm(6).split(3)]
    for args in batches:
        trace = poutine.trace(guide).get_trace(*args)
        replayed = poutine.trace(poutine.replay(problem.model, trace)).get_trace(*args)
        for name in latent_sites(problem):
            assert trace.nodes[name]["scale"] == replayed.nodes[name]["scale"] == (2.0 if name in problem.locals else 1.0)
    elbo = vectorised(problem)
    whole, *parts = (estimate(lambda a=args: elbo.loss(problem.model, guide, *a), 12) for args in (problem.args, *batches))
    assert agree(whole, (sum(part[0] for part in parts) / 2, sum(part[1] for part in parts) / 4)), (whole, parts)


@pairs_where(lambda entry, model: entry.mini_batches and not entry.needs_all_data and model not in WITHOUT_MINI_BATCHES)
def test_mini_batch_is_drawn_as_if_it_were_all_data(guide_id, model_id):
    with pyro.settings.context(module_local_params=True):
        problem, guide = start(guide_id, model_id)
        moved(problem, guide)
        args = problem.batch(torch.arange(3))
        small = MODELS[model_id](torch.float32, num_data=3)
        other = GUIDES[guide_id].make(small)
        other(*args[:-1])
        for theirs, ours in ((problem.model, small.model), (guide, other)):
            if isinstance(ours, nn.Module):
                rows = {name: tuple(map(slice, value.shape)) for name, value in tensors(ours).items()}
                ours.load_state_dict({name: value[rows[name]] for name, value in tensors(theirs).items()}, strict=False)
        expected = draw(other, args[:-1])
        for name, value in draw(guide, args).items():
            torch.testing.assert_close(value, expected[name])


@pairs_where(lambda entry, model: not entry.mini_batches and model not in WITHOUT_MINI_BATCHES)
def test_mini_batches_refused(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    with pytest.raises(ValueError, match="while plate 'data', which their score sums over, is subsampled"):
        guide(*problem.batch(torch.tensor([3, 1])))


def test_traced_score_is_the_pure_one():
    with pyro.settings.context(module_local_params=True):
        problem, guide = start("annealed-local", "gplvm")
        expected = moved(problem, guide)
        traced = GUIDES["annealed-local-traced"].make(problem)
        traced(*problem.args)
        traced.load_state_dict(guide.state_dict())
        for name, value in draw(traced, problem.args).items():
            torch.testing.assert_close(value, expected[name])


def random_rows(y):
    """A model that draws its own mini-batch."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 6, subsample_size=2) as idx:
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(loc + x.sum(-1), 1.0), obs=y[idx])


@pytest.mark.parametrize(
    "guide_id", [guide for guide, entry in GUIDES.items() if entry.mini_batches and "local" in entry.models]
)
def test_random_mini_batches(guide_id):
    problem = Problem(random_rows, (torch.randn(6),), "x", 1, ("x",), local={"local_plate": "data"})
    guide = GUIDES[guide_id].make(problem)
    for _ in range(2):
        trace = poutine.trace(guide).get_trace(*problem.args)
        replayed = poutine.trace(poutine.replay(random_rows, trace)).get_trace(*problem.args)
        assert torch.equal(trace.nodes["data"]["value"], replayed.nodes["data"]["value"])
        assert trace.nodes["x"]["scale"] == replayed.nodes["x"]["scale"] == 3.0
        assert trace.nodes["x"]["value"].shape == (2, 2)
    assert loss_at(problem, guide).isfinite()


@every_pair
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
def test_predictive(guide_id, model_id, parallel):
    problem, guide = start(guide_id, model_id)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            samples = Predictive(problem.model, guide=guide, num_samples=3, parallel=parallel)(*problem.args)
        for name, site in latent_sites(problem).items():
            value = samples[name].reshape(3, *site["value"].shape)
            assert site["fn"].support.check(value).all(), name
            assert not torch.equal(value[0], value[1]), name


@every_pair
def test_draws_do_not_depend_on_the_gradient_mode(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    expected = draw(guide, problem.args)
    assert all(value.requires_grad for value in expected.values())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            values = draw(guide, [arg.clone() for arg in problem.args])
        for name, value in values.items():
            assert not value.requires_grad
            torch.testing.assert_close(value, expected[name].detach())


@every_pair
def test_importance_weights(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    posterior = Importance(problem.model, guide, num_samples=5).run(*problem.args)
    assert 0.999 < posterior.get_ESS() < 5.001
    if model_id == "global":
        assert math.isfinite(psis_diagnostic(problem.model, guide, *problem.args, num_particles=200))


@every_pair
def test_dtype(guide_id, model_id, dtype):
    problem, guide = start(guide_id, model_id, dtype)
    for name, tensor in tensors(guide).items():
        assert tensor.dtype == dtype, name
    for name, value in guide(*problem.args).items():
        assert value.dtype == dtype, name
    assert loss_at(problem, guide).dtype == dtype


@every_pair
@pytest.mark.parametrize("local_params", [False, True], ids=["param-store", "module-local"])
def test_step_moves_every_parameter(guide_id, model_id, local_params):
    with pyro.settings.context(module_local_params=local_params):
        problem, guide = start(guide_id, model_id)
        before = {name: value.detach().clone() for name, value, _ in parameters(problem, guide)}
        SVI(problem.model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(*problem.args)
        assert before
        for name, value, _ in parameters(problem, guide):
            assert not torch.equal(before[name], value), name


@pairs_where(lambda entry, model: model == "global")
def test_fit_improves_the_bound(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    before = vectorised(problem).loss(problem.model, guide, *problem.args)
    svi = SVI(problem.model, guide, Adam({"lr": 0.05}), vectorised(problem, num_particles=5))
    for _ in range(50):
        svi.step(*problem.args)
    after = vectorised(problem).loss(problem.model, guide, *problem.args)
    assert after < before - 10.0


@every_pair
def test_arviz(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    tree = to_arviz(problem.model, guide, *problem.args, num_samples=4, seed=0)
    assert set(tree.posterior.data_vars) == set(latent_sites(problem))
    for name, value in tree.posterior.data_vars.items():
        assert value.sizes["draw"] == 4
        assert value.notnull().all(), name
    assert abs(tree.sample_stats["log_weight"]).max() < math.inf
