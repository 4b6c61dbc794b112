"""The annealed guide against quadrature, closed forms, finite differences, and itself by another way."""

import math
import subprocess
import sys
from functools import partial
from itertools import pairwise

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.inspect import get_model_relations

from pyro_lvgp._compile.recording import record_pure
from pyro_lvgp.diagnostics import bound_sandwich, effective_sample_size, log_weights, pareto_k
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed import _compiled_chain
from pyro_lvgp.guides.annealed.schedules import power_schedule, sigmoid_schedule
from pyro_lvgp.guides.annealed.transitions import STEPS
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import ZeroImputation
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("float64")


def standard_error(x):
    return x.std(0) / len(x) ** 0.5


def gplvm(latent_dim, **kwargs):
    """Four rows of three entries, one missing, and a u to be given."""
    torch.manual_seed(3)
    Y = torch.randn(4, 3)
    Y[1, 2] = torch.nan
    return BayesianGPLVM(4, 3, latent_dim, num_inducing=4, **kwargs), torch.randn(3, 4), Y


def evidence_by_quadrature(model, u, Y):
    """Log p(y_n | u) on a grid of latents, from the formulas of the model."""
    axis = torch.linspace(-6.0, 6.0, 201)
    X = torch.cartesian_prod(*[axis] * model.latent_dim).reshape(-1, model.latent_dim)
    with torch.no_grad():
        Z, noise = model.inducing_points, model.likelihood.variance
        Kuu, Kuf = model.kernel(Z), model.kernel(Z, X)
        A = torch.linalg.solve(torch.linalg.cholesky(Kuu + 1e-8 * Kuu.diagonal().mean() * torch.eye(len(Z))), Kuf)
        residual = Y[:, None] - A.mT @ u.mT
        entries = -0.5 * (residual.square() + (model.kernel.diagonal(X) - A.square().sum(0))[:, None]) / noise
        entries = torch.where(torch.isnan(Y)[:, None], 0.0, entries - 0.5 * (2.0 * math.pi * noise).log()).sum(-1)
        log_prior = dist.Normal(0.0, 1.0).log_prob(X).sum(-1)
        return (entries + log_prior).logsumexp(-1) + model.latent_dim * (axis[1] - axis[0]).log()


def given(model, guide, u):
    """Model and guide at one u, which is in neither any more."""
    return poutine.condition(model, {"u": u}), poutine.block(poutine.condition(guide, {"u": u}), hide=["u"])


def weights_given(model, guide, u, Y, num_samples):
    return log_weights(*given(model, guide, u), Y, num_samples=num_samples, local_plate="data")


@pytest.mark.parametrize("dynamics", list(STEPS))
@pytest.mark.parametrize("num_steps", [1, 4, 16, 64])
@pytest.mark.parametrize("latent_dim", [1, 2])
def test_weights_of_a_gplvm_are_unbiased(latent_dim, num_steps, dynamics):
    model, u, Y = gplvm(latent_dim)
    guide = AutoAnnealedLangevin(
        model, num_steps=num_steps, dynamics=dynamics, base_guide=MeanFieldGuide(model, init_scale=1.0), step_size=0.05
    )
    log_w = weights_given(model, guide, u, Y, 20_000)
    w = (log_w - evidence_by_quadrature(model, u, Y)).exp()
    assert (standard_error(w) < 0.05).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


@pytest.mark.parametrize("dynamics", list(STEPS))
def test_bound_of_a_gplvm_rises_with_the_number_of_steps(dynamics):
    model, u, Y = gplvm(2)
    evidence, bounds = evidence_by_quadrature(model, u, Y).sum(), []
    for num_steps in (1, 4, 16, 64):
        pyro.clear_param_store()
        base = MeanFieldGuide(model, init_scale=1.0)
        guide = AutoAnnealedLangevin(model, num_steps=num_steps, dynamics=dynamics, base_guide=base, step_size=0.1)
        log_w = weights_given(model, guide, u, Y, 4000).sum(-1)
        assert log_w.mean() < evidence + 3.0 * standard_error(log_w)
        bounds.append(log_w.mean() - 3.0 * standard_error(log_w))
    assert all(longer > shorter for shorter, longer in pairwise(bounds))


@pytest.mark.parametrize("dynamics", list(STEPS))
@pytest.mark.parametrize("num_steps", [1, 4, 16, 64])
def test_weights_with_a_linear_kernel_are_unbiased_for_factor_analysis(num_steps, dynamics):
    """With M ≥ Q nothing is lost to inducing points: y_n | u ~ N(0, W Wᵀ + σ² I)."""
    model, u, Y = gplvm(2, kernel=Linear(2))
    Y = torch.nan_to_num(Y)
    with torch.no_grad():
        Z = model.inducing_points
        L = torch.linalg.cholesky(Z @ Z.mT + 1e-8 * (Z @ Z.mT).diagonal().mean() * torch.eye(4))
        W = u @ torch.linalg.solve(L, Z)
        evidence = dist.MultivariateNormal(torch.zeros(3), W @ W.mT + model.likelihood.variance * torch.eye(3)).log_prob(Y)
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, num_steps=num_steps, dynamics=dynamics, base_guide=base, step_size=0.05)
    w = (weights_given(model, guide, u, Y, 20_000) - evidence).exp()
    assert (standard_error(w) < 0.05).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


def beta_bernoulli(y):
    """Joint and constrained: log p(y) = log B(2 + Σy, 3 + Σ(1 − y)) − log B(2, 3)."""
    p = pyro.sample("p", dist.Beta(2.0, 3.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


def gamma_poisson(y):
    """A rate for each datum: y_n is negative binomial."""
    with pyro.plate("data", len(y)):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(rate), obs=y)


def dirichlet_categorical(y):
    """A simplex, whose unconstrained space has one dimension less."""
    p = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(p), obs=y)


def _log_beta(a):
    return a.lgamma().sum() - a.sum().lgamma()


@pytest.mark.parametrize("dynamics", list(STEPS))
@pytest.mark.parametrize(
    ("model", "y", "plate", "evidence"),
    [
        (
            beta_bernoulli,
            torch.tensor([1.0, 1.0, 0.0, 1.0]),
            None,
            _log_beta(torch.tensor([5.0, 4.0])) - _log_beta(torch.tensor([2.0, 3.0])),
        ),
        (
            gamma_poisson,
            torch.tensor([0.0, 2.0, 5.0]),
            "data",
            dist.NegativeBinomial(2.0, torch.tensor(0.5)).log_prob(torch.tensor([0.0, 2.0, 5.0])),
        ),
        (
            dirichlet_categorical,
            torch.tensor([0.0, 2.0, 2.0]),
            None,
            _log_beta(torch.tensor([2.0, 2.0, 5.0])) - _log_beta(torch.tensor([1.0, 2.0, 3.0])),
        ),
    ],
    ids=["beta", "gamma", "dirichlet"],
)
def test_constrained_sites_have_the_right_jacobian(model, y, plate, evidence, dynamics):
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, local_plate=plate, num_steps=4, dynamics=dynamics, base_guide=base, step_size=0.1)
    w = (log_weights(model, guide, y, num_samples=10_000) - evidence).exp()
    assert (standard_error(w) < 0.05).all()
    assert ((w.mean(0) - 1.0).abs() < 3.0 * standard_error(w)).all()


def test_importance_weighting_tightens_the_annealed_bound():
    model, u, Y = gplvm(1)
    base = MeanFieldGuide(model, init_scale=1.0)
    guide = AutoAnnealedLangevin(model, num_steps=3, dynamics="overdamped", base_guide=base, step_size=0.1)
    bounds = []
    for num_samples in (1, 4, 16):
        bound = ImportanceWeightedELBO(num_samples=num_samples, integrate=False, max_plate_nesting=1)
        draws = -torch.tensor([bound.loss(*given(model, guide, u), Y) for _ in range(100)])
        bounds.append((draws.mean(), standard_error(draws)))
    (one, e1), (four, e4), (many, e16) = bounds
    assert one + 3.0 * (e1 + e4) < four
    assert four + 3.0 * (e4 + e16) < many
    log_p_u = dist.Normal(0.0, 1.0).log_prob(u).sum()
    assert many < evidence_by_quadrature(model, u, Y).sum() + log_p_u + 3.0 * e16


def small(dtype=torch.float64):
    torch.manual_seed(0)
    Y = torch.randn(8, 3, dtype=dtype)
    Y[2, 1] = torch.nan
    return BayesianGPLVM(8, 3, 2, num_inducing=4).to(dtype).initialize(Y), Y


class Traced:
    """The model without its log joint, so that the guide has to trace it."""

    def __init__(self, model):
        self.model = model
        self.num_calls = 0

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        return self.model(*args, **kwargs)

    def __getattr__(self, name):
        if name in ("log_joint", "score", "statistics"):
            raise AttributeError(name)
        return getattr(self.model, name)


LOSSES = {
    "drawn": lambda: Trace_ELBO(max_plate_nesting=1),
    "analytic": lambda: TraceMeanField_ELBO(max_plate_nesting=1),
    "vectorised": lambda: Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
    "integrated": lambda: MeanFieldELBO(max_plate_nesting=1),
    "weighted": lambda: ImportanceWeightedELBO(num_samples=3, max_plate_nesting=1),
}


def value_and_gradients(model, guide, loss, *args):
    torch.manual_seed(5)
    value = loss.differentiable_loss(model, guide, *args)
    parameters = [p for module in (getattr(model, "model", model), guide) for p in module.parameters()]
    return value, torch.autograd.grad(value, parameters)


def at_its_start(make, target, Y, loss, *args):
    """Value and gradients under a guide of a model, from the same start each time."""
    pyro.clear_param_store()
    guide = make(target)
    torch.manual_seed(4)
    guide(Y)
    return value_and_gradients(target, guide, loss, *args)


def assert_paths_agree(make, model, Y, loss, *args):
    """Whether scores come from the model's log joint or from tracing it."""
    (pure, pure_gradients), (traced, traced_gradients) = (
        at_its_start(make, target, Y, loss, *args) for target in (model, Traced(model))
    )
    assert torch.allclose(pure, traced, rtol=1e-10)
    for a, b in zip(pure_gradients, traced_gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("dynamics", list(STEPS))
def test_traced_and_pure_paths_agree(dynamics, loss, covariance):
    def make(target):
        base = MeanFieldGuide(target, covariance={"X": covariance})
        return AutoAnnealedLangevin(target, num_steps=3, dynamics=dynamics, base_guide=base)

    (model, Y), idx = small(), torch.tensor([2, 5, 1])
    assert_paths_agree(make, model, Y, LOSSES[loss](), Y[idx], idx)


def test_compiled_chains_are_the_eager_ones_and_compiling_does_not_grow_with_their_length():
    """In a process of its own, because the shape checks of this one cannot be compiled."""
    script = ROOT / "tests" / "helpers" / "compiled_chains.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli(), NegativeBinomial()], ids=lambda x: type(x).__name__)
def test_compiled_chains_take_any_likelihood_and_draws_of_any_shape(monkeypatch, likelihood):
    """As graphs of operations that are run one by one."""
    monkeypatch.setattr(_compiled_chain, "compile_graph", lambda graph, *_, **__: graph)
    model = BayesianGPLVM(8, 3, 2, num_inducing=4, likelihood=likelihood)
    Y = torch.randint(2, (8, 3)).to(torch.get_default_dtype())
    results = []
    for compile in (False, True):
        pyro.clear_param_store()
        guide = AutoAnnealedLangevin(model, num_steps=2, compile=compile)
        torch.manual_seed(4)
        guide(Y)
        for _ in range(2):  # the first of each shape is not compiled
            torch.manual_seed(4)
            drawn = [guide.sample_posterior(n, Y)["X"] for n in (1, 3)]
            found = torch.cat(drawn), *value_and_gradients(model, guide, LOSSES["drawn"](), Y)
        results.append(found)
    (eager_X, eager, eager_gradients), (X, compiled, gradients) = results
    torch.testing.assert_close(X, eager_X)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradients, eager_gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "traced"])
@pytest.mark.parametrize("dynamics", list(STEPS))
def test_gradients_are_those_of_finite_differences(dynamics, pure):
    model, Y = small()
    target = model if pure else Traced(model)
    guide = AutoAnnealedLangevin(target, num_steps=3, dynamics=dynamics)
    guide(Y)
    loss = LOSSES["drawn"]()
    parameters = [*model.parameters(), *guide.parameters()]
    _, gradients = value_and_gradients(target, guide, loss, Y)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction, epsilon = torch.randn_like(parameter), 1e-5
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter += sign * epsilon * direction
                torch.manual_seed(5)
                values.append(loss.differentiable_loss(target, guide, Y))
                parameter -= sign * epsilon * direction
        numerical = (values[0] - values[1]) / (2.0 * epsilon)
        assert torch.allclose((gradient * direction).sum(), numerical, rtol=1e-5, atol=1e-5)


def test_detached_scores_leave_the_value_and_change_the_gradient():
    model, Y = small()
    (through, gradients), (detached, others) = (
        at_its_start(partial(AutoAnnealedLangevin, num_steps=3, differentiate_score=whether), model, Y, LOSSES["drawn"](), Y)
        for whether in (True, False)
    )
    assert torch.allclose(through, detached, rtol=1e-12)
    assert not all(torch.allclose(a, b) for a, b in zip(gradients, others, strict=True))


def test_a_chain_traces_the_model_k_plus_one_times():
    model, Y = small()
    target = Traced(model)
    guide = AutoAnnealedLangevin(target, num_steps=5)
    guide(Y)
    target.num_calls = 0
    guide(Y)
    assert target.num_calls == 6


@pytest.mark.parametrize("loss", ["drawn", "integrated", "weighted"])
def test_mini_batches_are_unbiased_for_all_rows(loss):
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=2)
    guide(Y)
    loss = LOSSES[loss]()
    full = torch.tensor([loss.loss(model, guide, Y) for _ in range(100)])
    batches = [torch.randperm(8)[:2] for _ in range(400)]
    sub = torch.tensor([loss.loss(model, guide, Y[idx], idx) for idx in batches])
    assert abs(full.mean() - sub.mean()) < 3.0 * torch.hypot(standard_error(full), standard_error(sub))


def test_integrating_bounds_anneal_towards_the_expectation_over_u():
    """At Q = 1, IW with many draws finds Σ_n log ∫ exp(E_q(u) log p(y_n | x, u)) N(x; 0, 1) dx."""
    model, _, Y = gplvm(1)
    base = MeanFieldGuide(model, init_scale=0.7)
    guide = AutoAnnealedLangevin(model, num_steps=4, base_guide=base, step_size=0.1)
    guide(Y)
    mean, L = base.locs.u.detach(), base.scales.u.detach()
    X = torch.linspace(-7.0, 7.0, 1001)[:, None]
    with torch.no_grad():
        Z, noise = model.inducing_points, model.likelihood.variance
        Luu = torch.linalg.cholesky(model.kernel(Z) + 1e-8 * torch.eye(4))
        A = torch.linalg.solve(Luu, model.kernel(Z, X))
        spread = model.kernel.diagonal(X) - A.square().sum(0)
        variance = spread[:, None] + torch.einsum("mx,dmk,djk,jx->xd", A, L, L, A)
        entries = -0.5 * ((Y[:, None] - A.mT @ mean.mT).square() + variance) / noise - 0.5 * (2 * math.pi * noise).log()
        rows = torch.where(torch.isnan(Y)[:, None], 0.0, entries).sum(-1) + dist.Normal(0.0, 1.0).log_prob(X).sum(-1)
        want = (rows.logsumexp(-1) + (X[1] - X[0]).log()).sum()
    kl = TraceMeanField_ELBO(max_plate_nesting=1).loss(
        lambda: _u_site(dist.Normal(torch.zeros(4), 1.0).to_event(1)),
        lambda: _u_site(dist.MultivariateNormal(mean, scale_tril=L)),
    )
    loss = ImportanceWeightedELBO(num_samples=2000, max_plate_nesting=1)
    got = -torch.tensor([loss.loss(model, guide, Y) for _ in range(20)])
    assert standard_error(got) < 0.02
    assert abs(got.mean() + kl - want) < 0.03


def _u_site(fn):
    with pyro.plate("outputs", 3):
        pyro.sample("u", fn)


def test_sandwich_holds_the_evidence_and_closes_with_longer_chains():
    def model(y):
        with pyro.plate("data", 400):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(2.0 * x, 0.5), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x = (truth.nodes[name]["value"] for name in ("y", "x"))
    evidence = dist.Normal(0.0, 4.25**0.5).log_prob(y).mean()
    gaps = []
    for num_steps in (4, 16, 64):
        pyro.clear_param_store()
        base = MeanFieldGuide(model, init_scale=1.0)
        guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=num_steps, base_guide=base, step_size=0.05)
        sandwich = bound_sandwich(model, guide, y, latents={"x": x}, num_samples=1)
        assert sandwich.lower.mean() < evidence < sandwich.upper.mean()
        gaps.append(sandwich.gap.mean())
    assert gaps[0] > 1.5 * gaps[1] > 1.5**2 * gaps[2]


def test_sandwich_of_a_mini_batch():
    def model(y, idx=None):
        with pyro.plate("data", 400, subsample=idx):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(2.0 * x, 2.0), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x = (truth.nodes[name]["value"] for name in ("y", "x"))
    base = MeanFieldGuide(model, init_scale=1.0, create_plates=lambda y, idx=None: pyro.plate("data", 400, subsample=idx))
    guide = AutoAnnealedLangevin(model, local_plate="data", base_guide=base, step_size=0.05)
    guide(y)
    with torch.no_grad():
        base.locs.x.copy_(torch.linspace(-1.0, 1.0, 400))
    # Rows, and a base that is not the same for all: weights of a mini-batch are those of its rows among all.
    idx = torch.arange(0, 400, 2)
    every, some = (
        bound_sandwich(model, guide, y[rows], rows, latents={"x": x[rows]}, num_samples=2000)
        for rows in (torch.arange(400), idx)
    )
    assert some.lower.shape == (200,)
    for one, other in ((some.lower, every.lower), (some.upper, every.upper)):
        assert (one - other[idx]).abs().mean() < 0.05 < (one - other[idx - 10]).abs().mean()
    with pytest.raises(ValueError, match=r"value of site 'x' of shape \[200\] .*got \[400\]; with a mini-batch"):
        bound_sandwich(model, guide, y[idx], idx, latents={"x": x})


def test_sandwich_of_another_guide_is_refused(unchecked):
    model, Y = small()
    with pytest.raises(TypeError, match=r"expected an AutoAnnealedLangevin.*got MeanFieldGuide"):
        bound_sandwich(model, MeanFieldGuide(model), Y, latents={})


def test_sandwich_holds_globals_at_their_true_values():
    model, _ = small()
    model.likelihood_term = "fitc"
    truth = poutine.trace(model).get_trace()
    y, u, X = (truth.nodes[name]["value"] for name in ("y", "u", "X"))
    guide = AutoAnnealedLangevin(model, num_steps=20, base_guide=MeanFieldGuide(model, init_scale=1.0), step_size=0.02)
    sandwich = bound_sandwich(model, guide, y, latents={"u": u, "X": X}, num_samples=50)
    assert sandwich.lower.shape == (8,)
    assert sandwich.lower.mean() < sandwich.upper.mean()
    with pytest.raises(ValueError, match="got none for \\['u'\\]"):
        bound_sandwich(model, guide, y, latents={"X": X})
    model.likelihood_term = "svgp"
    with pytest.raises(ValueError, match='whose density is that of its draws, got likelihood_term="svgp"'):
        bound_sandwich(model, guide, y, latents={"u": u, "X": X})


@pytest.mark.parametrize("plate", ["data", None])
def test_a_sandwich_is_of_the_evidence_given_sites_that_are_held(plate):
    def model(y):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(5.0, 0.1))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(x + z, 1.0), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x, z = (truth.nodes[name]["value"] for name in ("y", "x", "z"))
    guide = AutoAnnealedLangevin(model, local_plate=plate, sites=["x"], num_steps=2, step_size=0.01)
    guide(y)
    guide.base_guide.locs.x, guide.base_guide.scales.x = 0.5 * (y - z), torch.full((3,), 0.5**0.5)
    sandwich = bound_sandwich(model, guide, y, latents={"x": x, "z": z}, num_samples=20)
    evidence = dist.Normal(z, 2.0**0.5).log_prob(y)
    for side in (sandwich.lower, sandwich.upper):
        torch.testing.assert_close(side, evidence if plate else evidence.sum(), atol=0.01, rtol=0.0)


@pytest.mark.parametrize("plate", ["data", None])
def test_a_sandwich_of_a_model_for_one_draw_at_a_time(plate):
    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0))
            return pyro.sample("y", dist.Normal(x.reshape(3), 1.0), obs=y)

    truth = poutine.trace(model).get_trace(None)
    y, x = (truth.nodes[name]["value"] for name in ("y", "x"))
    guide = AutoAnnealedLangevin(model, local_plate=plate, num_steps=2, step_size=0.01)
    guide(y)
    guide.base_guide.locs.x, guide.base_guide.scales.x = 0.5 * y, torch.full((3,), 0.5**0.5)
    with pytest.raises(RuntimeError):
        bound_sandwich(model, guide, y, latents={"x": x}, num_samples=20)
    sandwich = bound_sandwich(model, guide, y, latents={"x": x}, num_samples=20, vectorize=False)
    evidence = dist.Normal(0.0, 2.0**0.5).log_prob(y)
    for side in (sandwich.lower, sandwich.upper):
        torch.testing.assert_close(side, evidence if plate else evidence.sum(), atol=0.01, rtol=0.0)
    assert log_weights(model, guide, y, num_samples=7, vectorize=False).shape == ((7, 3) if plate else (7,))


@pytest.mark.parametrize(
    ("what", "mask", "own_mask"),
    [
        ("a factor", True, True),
        ("a scale", True, True),
        ("a masked latent", torch.arange(3) > 0, True),
        ("a masked latent", False, True),
        ("a masked latent", True, torch.arange(3) > 0),
    ],
)
def test_a_sandwich_needs_a_density_of_draws(what, mask, own_mask):
    def model(y):
        with pyro.plate("data", 3):
            with poutine.mask(mask=mask), poutine.scale(scale=0.5 if what == "a scale" else 1.0):
                x = pyro.sample("x", dist.Normal(0.0, 1.0).mask(own_mask))
            if what == "a factor":
                pyro.factor("penalty", -x.square())
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    with pytest.raises(ValueError, match=f"expected a model whose density is that of its draws, got {what} at site"):
        bound_sandwich(model, guide, torch.zeros(3), latents={"x": torch.zeros(3)})


def regression(y, idx=None):
    """A global site behind a subsampled plate."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 10, subsample=idx):
        pyro.sample("y", dist.Normal(slope, 1.0), obs=y)


def test_globals_are_not_annealed_under_subsampling():
    y, idx = torch.randn(10), torch.tensor([1, 2])
    guide = AutoAnnealedLangevin(regression, num_steps=2)
    assert guide(y)["slope"].shape == ()
    with pytest.raises(ValueError, match=r"plate 'data', which (.|\n)*is subsampled(.|\n)*local_plate=(.|\n)*surrogate_model"):
        guide(y[idx], idx)


def test_globals_are_not_annealed_while_a_sequential_plate_is_subsampled():
    def model(y, idx=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", 5, subsample=idx):
            pyro.sample(f"y_{i}", dist.Normal(slope, 1.0), obs=y[i])

    y, guide = torch.randn(5), AutoAnnealedLangevin(model, num_steps=2)
    assert guide(y)["slope"].shape == ()
    with pytest.raises(ValueError, match=r"plate 'data', which (.|\n)*is subsampled"):
        guide(y, torch.tensor([1, 2]))


def test_locals_are_not_annealed_while_a_plate_in_their_score_is_subsampled():
    def model(y, columns=None):
        with pyro.plate("data", 4, dim=-1):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            with pyro.plate("columns", 10, subsample=columns, dim=-2):
                pyro.sample("y", dist.Normal(x, 1.0), obs=y if columns is None else y[columns])

    y = torch.randn(10, 4)
    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    assert guide(y)["x"].shape == (4,)
    with pytest.raises(ValueError, match="plate 'columns', which their score sums over, is subsampled"):
        guide(y, torch.tensor([1, 2]))


def steep_counts(y, rate=1.0):
    """Log rates whose posteriors are narrow."""
    with pyro.plate("data", 4):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson(rate * (8.0 * x).exp()), obs=y)


@pytest.mark.parametrize("traced", [True, False])
def test_chains_that_diverge_say_so(traced):
    if traced:
        args, guide = (torch.full((4,), 3000.0),), AutoAnnealedLangevin(steep_counts, local_plate="data")
    else:
        args = (torch.randn(10, 3),)
        model = BayesianGPLVM(10, 3, 2, Linear(2), num_inducing=3, likelihood=Gaussian(1e-12))
        guide = AutoAnnealedLangevin(model, num_steps=40)
    with pytest.raises(ValueError, match=r"a chain that stays finite, got NaN.* make step_size smaller"):
        guide(*args)


def test_errors_of_models_are_theirs_where_chains_are_finite():
    guide = AutoAnnealedLangevin(steep_counts, local_plate="data", num_steps=2, step_size=1e-6)
    guide(torch.ones(4))
    with pytest.raises(ValueError, match=r"Expected parameter rate"):
        guide(torch.ones(4), -1.0)


@pytest.mark.parametrize("vectorize", [True, False])
def test_all_draws_are_of_the_same_rows(vectorize):
    def model(y):
        with pyro.plate("data", 50, subsample_size=5) as idx:
            x = pyro.sample("x", dist.Normal(y[idx], 0.1))
            pyro.sample("y", dist.Normal(x, 0.1), obs=y[idx])

    y = 10.0 * torch.arange(50.0)
    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    guide(y)
    draws = guide.sample_posterior(6, y, chunk_size=2, vectorize=vectorize)["x"]
    assert draws.shape == (6, 5)
    assert (draws.std(0) < 1.0).all()
    low, high = guide.quantiles([0.25, 0.75], y, num_samples=200)["x"]  # in chunks of 100
    assert (high - low < 1.0).all()


@pytest.mark.parametrize("returned", [lambda scale: None, lambda scale: scale, lambda scale: {"scale": scale}])
def test_a_global_guide_may_be_a_function_that_returns_anything(returned):
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    def global_guide(y):
        return returned(pyro.sample("scale", dist.LogNormal(pyro.param("loc", torch.tensor(0.3)), 0.1)))

    y = torch.randn(3)
    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2, global_guide=global_guide)
    assert guide(y).keys() == {"scale", "x"}
    draws = guide.sample_posterior(200, y)
    assert draws["scale"].shape == (200,)
    assert draws["x"].shape == (200, 3)
    assert abs(draws["scale"].log().mean() - 0.3) < 0.03


def test_a_global_guide_may_make_its_plates_itself():
    def model(y):
        with pyro.plate("groups", 2):
            pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6, subsample_size=3) as rows:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            x = pyro.sample("x", dist.Normal(z, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[rows])

    means = torch.arange(6.0)

    def global_guide(y):
        with pyro.plate("groups", 2):
            pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6, subsample_size=3) as rows:
            pyro.sample("z", dist.Normal(means[rows], 1e-6))

    guide = AutoAnnealedLangevin(model, local_plate="data", sites=["x"], num_steps=2, global_guide=global_guide)
    y = torch.randn(6)
    trace = poutine.trace(guide).get_trace(y)
    assert trace.nodes["level"]["value"].shape == (2,)
    torch.testing.assert_close(trace.nodes["z"]["value"], means[trace.nodes["data"]["value"]], atol=1e-4, rtol=0.0)
    assert guide.sample_posterior(5, y)["x"].shape == (5, 3)


def test_what_its_sites_depend_on_can_be_drawn():
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(y, scale))

    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    guide(torch.zeros(3))
    assert get_model_relations(guide, (torch.zeros(3),))["sample_sample"] == {"scale": [], "x": ["scale"]}


def test_predictions_without_the_data_are_told_how_to_predict():
    def model(y=None):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide, y = AutoAnnealedLangevin(model, local_plate="data", num_steps=2), torch.randn(3)
    guide(y)
    with pytest.raises(ValueError, match=r"got 'y', .* predictions too: Predictive\(model, guide\.sample_posterior\("):
        Predictive(model, guide=guide, num_samples=4)()
    assert Predictive(model, guide.sample_posterior(4, y))()["y"].shape == (4, 3)


def test_a_surrogate_makes_annealed_globals_right_under_subsampling():
    y = torch.randn(10) + 1.0

    def surrogate(batch, idx=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        weight = pyro.param("weight", torch.tensor(2.0), constraint=dist.constraints.positive)
        with pyro.plate("few", 3), poutine.scale(scale=weight):
            pyro.sample("y", dist.Normal(slope, 1.0), obs=y[:3])

    guide = AutoAnnealedLangevin(regression, num_steps=3, surrogate_model=surrogate)
    loss = Trace_ELBO(max_plate_nesting=1)
    full = torch.tensor([loss.loss(regression, guide, y) for _ in range(200)])
    batches = [torch.randperm(10)[:4] for _ in range(400)]
    sub = torch.tensor([loss.loss(regression, guide, y[idx], idx) for idx in batches])
    assert abs(full.mean() - sub.mean()) < 3.0 * torch.hypot(standard_error(full), standard_error(sub))
    loss.differentiable_loss(regression, guide, y[:4], torch.arange(4)).backward()
    assert pyro.get_param_store()._params["weight"].grad.abs() > 0


@pytest.mark.parametrize(("dynamics", "step_size"), [("overdamped", 0.02), ("underdamped", 0.2)])
def test_posterior_draws_have_the_moments_of_the_posterior(dynamics, step_size):
    """A Gaussian model whose posterior is N(0.8 y / 2, 0.2) for each row; long chains from a poor base."""

    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(2.0 * x, 1.0), obs=y)

    y = torch.tensor([-2.0, 0.0, 3.0])
    base = MeanFieldGuide(model, init_scale=1.0)
    chain = {"num_steps": 200, "dynamics": dynamics, "step_size": step_size}
    guide = AutoAnnealedLangevin(model, local_plate="data", base_guide=base, **chain)
    x = guide.sample_posterior(4000, y, chunk_size=4000)["x"]
    assert torch.allclose(x.mean(0), 0.4 * y, atol=0.03)
    assert torch.allclose(x.std(0), torch.full((3,), 0.2**0.5), rtol=0.06)


@pytest.mark.parametrize(
    ("num_samples", "chunk_size", "error", "message"),
    [
        (0, 1, ValueError, "expected num_samples of 1 or more, got 0"),
        (2.5, 1, TypeError, r"expected num_samples to be an integer, got 2\.5"),
        (2, 0, ValueError, "expected chunk_size of 1 or more, got 0"),
    ],
)
def test_numbers_of_draws_are_checked(unchecked, num_samples, chunk_size, error, message):
    model, Y = small(torch.float32)
    guide = AutoAnnealedLangevin(model, num_steps=2)
    with pytest.raises(error, match=message):
        guide.sample_posterior(num_samples, Y, chunk_size=chunk_size)


def test_median_and_quantiles_are_those_of_the_draws():
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=2)
    guide(Y)
    torch.manual_seed(7)
    draws = guide.sample_posterior(30, Y)
    quantiles = guide.quantiles([0.1, 0.5], Y, num_samples=30, seed=7)
    for name, shape in {"u": (3, 4), "X": (8, 2)}.items():
        assert draws[name].shape == (30, *shape)
        assert quantiles[name].shape == (2, *shape)
        assert torch.equal(quantiles[name], draws[name].quantile(torch.tensor([0.1, 0.5]), dim=0))
        assert torch.equal(guide.median(Y, num_samples=30, seed=7)[name], quantiles[name][1])
    assert guide.sample_posterior(30, Y, chunk_size=20)["X"].shape == (30, 8, 2)
    one_by_one = guide.sample_posterior(30, Y, vectorize=False)
    assert one_by_one["X"].shape == (30, 8, 2)
    assert torch.allclose(one_by_one["X"].mean(0), draws["X"].mean(0), atol=0.3)


def test_other_likelihoods_and_kernels_are_annealed_too():
    model = BayesianGPLVM(8, 3, 2, Linear(2) + 0.1 * Linear(2), num_inducing=4, likelihood=Poisson())
    Y = torch.randint(0, 5, (8, 3)).double()
    assert_paths_agree(partial(AutoAnnealedLangevin, num_steps=2), model, Y, LOSSES["drawn"](), Y)


def test_the_gaussian_term_sampled_is_annealed_as_its_expectation():
    model = BayesianGPLVM(8, 3, 2, num_inducing=4, likelihood=Gaussian(), likelihood_term="sampled")
    Y = torch.randn(8, 3)
    assert torch.isfinite(torch.tensor(Trace_ELBO().loss(model, AutoAnnealedLangevin(model, num_steps=2), Y)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps of 1 or more, got 0"),
        ({"dynamics": "brownian"}, "dynamics in .*, got 'brownian'"),
        ({"step_size": 2.0}, "0 < step_size < max_step_size, got 2.0 and 1.0"),
        ({"momentum_persistence": 1.0}, "momentum_persistence between 0 and 1, got 1.0"),
        ({"annealing_schedule": "cubic"}, "schedule .*, got 'cubic'"),
        ({"annealing_schedule": -1.0}, "positive power, got -1.0"),
        ({"annealing_schedule": math.inf}, "positive power, got inf"),
        ({"annealing_schedule": True}, "positive power, got True"),
    ],
)
def test_bad_arguments_are_refused(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        AutoAnnealedLangevin(regression, **arguments)


def test_bad_sites_are_refused():
    y = torch.randn(10)
    with pytest.raises(ValueError, match=r"among \['slope'\], got \['slop'\]"):
        AutoAnnealedLangevin(regression, sites=["slop"])(y)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"expected sites in plate 'data', got \['slope'\]"):
        AutoAnnealedLangevin(regression, local_plate="data", sites=["slope"])(y)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"expected a list of sites, got 'slope'; write \['slope'\]"):
        AutoAnnealedLangevin(regression, sites="slope")
    with pytest.raises(ValueError, match=r"compile=True needs a model with log_joint, got function"):
        AutoAnnealedLangevin(regression, compile=True)
    model, Y = small()
    with pytest.raises(ValueError, match=r"compile=True anneals the sites of the model's log_joint, got \['X', 'u'\]"):
        AutoAnnealedLangevin(model, sites=["X", "u"], compile=True)(Y)


def test_globals_that_nobody_draws_are_refused():
    model, Y = small()
    with pytest.raises(ValueError, match=r"every latent site to be in the guide, got \['u'\], neither annealed nor drawn"):
        AutoAnnealedLangevin(model, global_guide=lambda y, idx=None: None)(Y)


def test_base_guides_that_have_run_are_refused():
    model, Y = small()
    base = MeanFieldGuide(model)
    base(Y)
    with pytest.raises(ValueError, match="expected a base guide that has not run"):
        AutoAnnealedLangevin(model, base_guide=base)


def test_base_guides_without_gaussians_are_refused(unchecked):
    with pytest.raises(TypeError, match=r"expected pyro_lvgp.guides.MeanFieldGuide\(model, ...\) as .*, got AutoNormal"):
        AutoAnnealedLangevin(regression, base_guide=AutoNormal(regression))
    with pytest.raises(TypeError, match=r"expected num_steps to be an integer, got 2\.5"):
        AutoAnnealedLangevin(regression, num_steps=2.5)


@pytest.mark.parametrize("observed", [True, False], ids=["data", "another latent"])
def test_what_depends_on_local_sites_outside_their_plate_is_refused(observed):
    def model(y):
        with pyro.plate("data", 3):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("z", dist.Normal(x, 1.0), obs=y)
        if observed:
            pyro.sample("total", dist.Normal(x.sum(-1), 1.0), obs=torch.tensor(1.0))
        else:
            pyro.sample("total", dist.Normal(x.sum(-1), 1.0))

    y = torch.randn(3)
    with pytest.raises(ValueError, match="in plate 'data', got site 'total' outside of it"):
        AutoAnnealedLangevin(model, local_plate="data", num_steps=2)(y)
    pyro.clear_param_store()
    AutoAnnealedLangevin(model, num_steps=2)(y)


def test_a_discrete_site_is_refused():
    def model():
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(z, 1.0))

    with pytest.raises(ValueError, match="got 'z', which is neither annealed nor drawn"):
        AutoAnnealedLangevin(model, sites=["x"], base_guide=MeanFieldGuide(poutine.block(model, hide=["z"])))()


def test_effective_sample_size_of_known_weights():
    assert torch.allclose(
        effective_sample_size(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, -torch.inf]])), torch.tensor([3.0, 2.0])
    )
    far = torch.full((100,), -1e7, dtype=torch.float32)
    assert torch.allclose(effective_sample_size(far), torch.tensor(100.0, dtype=torch.float32))


def test_pareto_k_without_a_tail():
    log_weights = torch.randn(200, 6)
    expected = pareto_k(log_weights)[0]
    log_weights[:, 1] = 2.0  # all equal
    log_weights[:, 2] *= 1000.0  # one weight beside which all others vanish
    log_weights[5, 3] = torch.nan
    log_weights[:, 4] = (torch.arange(200) >= 180).float()  # two values, the larger one within the tail
    log_weights[:30, 5] = -torch.inf
    found = pareto_k(log_weights)
    torch.testing.assert_close(found[0], expected)
    assert found[1] == -torch.inf
    assert found[2] == torch.inf
    assert torch.isnan(found[3])
    assert found[4] == -torch.inf
    assert torch.isfinite(found[5])
    many = (torch.arange(1600) >= 1490).float()  # as many above the threshold as make the estimate divide by zero
    assert pareto_k(many) == -torch.inf


def test_pareto_k_finds_the_shape_of_the_tail():
    """Weights with tail index 1/k: w = v^-k for uniform v."""
    uniform = torch.rand(20_000, 1)
    k = torch.tensor([0.2, 0.5, 1.0])
    assert torch.allclose(pareto_k(-k * uniform.log()), k, atol=0.12)
    with pytest.raises(ValueError, match="25 draws or more to fit a tail, got 10"):
        pareto_k(torch.zeros(10))


@pytest.mark.parametrize(
    ("schedule", "beta"),
    [("linear", power_schedule(4, 1.0)), (2.0, power_schedule(4, 2.0)), ("sigmoid", sigmoid_schedule(4))],
    ids=["linear", "power", "sigmoid"],
)
def test_fixed_schedules_and_step_sizes_are_buffers(schedule, beta):
    model, Y = small(torch.float32)
    guide = AutoAnnealedLangevin(model, num_steps=4, annealing_schedule=schedule, learn_step_size=False)
    guide(Y)
    learned = {name for name, _ in guide.named_parameters()}
    assert not any("step_sizes" in name or "increments" in name for name in learned)
    assert torch.equal(guide.beta, beta)
    buffers = dict(guide.double().named_buffers())
    assert buffers["beta"].dtype == buffers["step_sizes.X"].dtype == torch.float64


def test_learned_schedules_and_step_sizes_are_parameters_within_their_bounds():
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=4, dynamics="underdamped", step_size=0.3, max_step_size=0.5)
    guide(Y)
    assert torch.allclose(guide.step_sizes.X, torch.full((4, 2), 0.3))
    with torch.no_grad():
        guide.step_sizes.X_unconstrained += 100.0
    assert guide.step_sizes.X.max() <= 0.5
    assert torch.equal(guide.increments, torch.ones(4))
    assert guide.momentum_persistence.item() == pytest.approx(0.8)


def test_draws_reach_prediction_and_new_rows():
    """What models do with a guide they do with this one."""
    model, Y = small()
    guide = AutoAnnealedLangevin(model, num_steps=3)
    guide(Y)
    assert model.reconstruct(guide, Y, num_samples=4).mean.shape == (8, 3)
    filled = model.impute(guide, Y, num_samples=4).mean
    assert torch.equal(filled[~torch.isnan(Y)], Y[~torch.isnan(Y)])
    assert model.infer_latents(guide, Y[:2], num_steps=5).mean.shape == (2, 2)


def hierarchy(y):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(level, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.mark.parametrize("bound", [MeanFieldELBO, ImportanceWeightedELBO])
def test_draws_of_some_sites_again_are_refused_where_all_have_one_weight(bound):
    y, guide = torch.randn(5), AutoAnnealedLangevin(hierarchy, num_steps=2)
    with pytest.raises(
        ValueError, match=r"as many draws of each annealed site, got \[1, 3\]: .* take num_samples=1 or Trace_ELBO"
    ):
        bound(num_samples=3).loss(hierarchy, guide, y)
    assert math.isfinite(bound(num_samples=1).loss(hierarchy, guide, y))
    assert math.isfinite(Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1).loss(hierarchy, guide, y))


def test_weights_are_those_of_all_sites_before_the_first_call_too():
    y, guide = torch.randn(5), AutoAnnealedLangevin(hierarchy, num_steps=2)
    assert [log_weights(hierarchy, guide, y, num_samples=4).shape for _ in range(2)] == [(4,), (4,)]


def test_the_start_of_a_chain_has_a_name_of_its_own():
    def model(y):
        with pyro.plate("data", len(y)):
            scale = pyro.sample("x_noise", dist.LogNormal(0.0, 1.0))
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, scale), obs=y)

    y, guide = torch.randn(3), AutoAnnealedLangevin(model, local_plate="data", sites=["x"], num_steps=1)
    guide(y)
    known = poutine.condition(guide, {"x_noise": torch.ones(3)})
    assert not torch.allclose(known(y)["x"], known(y)["x"])


def test_a_subclass_with_another_forward_is_traced():
    class Shifted(BayesianGPLVM):
        def forward(self, y, idx=None):
            with poutine.reparam(config={}):
                return super().forward(y, idx)

    Y = torch.randn(4, 3)
    guide = AutoAnnealedLangevin(Shifted(4, 3, 1, num_inducing=3), num_steps=1)
    guide(Y)
    assert not guide._pure


def test_a_log_joint_that_reads_a_parameter_is_not_recorded():
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="one that reads a parameter of shape"):
        record_pure(lambda x: [x * scale], [torch.ones(2)])


def test_inferred_latents_start_at_the_encoding_of_the_base():
    Y = torch.randn(6, 3)
    model = BayesianGPLVM(6, 3, 2, num_inducing=3).initialize(Y)
    base = MeanFieldGuide(model, encoders={"X": ZeroImputation(3, 2, (4,))})
    guide = AutoAnnealedLangevin(model, num_steps=1, base_guide=base)
    guide(Y)
    loc, scale = base.encoders.X(Y)
    found = model.infer_latents(guide, Y, num_steps=0)
    torch.testing.assert_close(found.mean, loc)
    torch.testing.assert_close(found.variance.sqrt(), scale)
