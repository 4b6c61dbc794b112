"""The model against slow twins, closed forms and quadrature."""

import copy
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroSample
from torch import nn

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.kernels import RBF, Linear
from pyro_lvgp.likelihoods import Bernoulli, Binomial, Gaussian, LogNormal, NegativeBinomial, Poisson, StudentT
from pyro_lvgp.models import BayesianGPLVM, LatentVariableModel, RandomFeatureLVM
from pyro_lvgp.networks import IndexNet

N, D, Q, M = 12, 3, 2, 5


pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def Y():
    return torch.randn(N, D)


def _model(**kwargs):
    return BayesianGPLVM(N, D, kwargs.pop("latent_dim", Q), num_inducing=M, **kwargs)


def _holes(Y):
    Y = Y.clone()
    Y[torch.rand(Y.shape) < 0.5] = torch.nan
    Y[:, 0] = torch.where(torch.isnan(Y).all(1), torch.ones(len(Y)), Y[:, 0])
    return Y


def _log_joint(model, Y, X, u, idx=None):
    data = {"X": X, "u": u}
    return poutine.trace(poutine.condition(model, data)).get_trace(Y, idx).log_prob_sum()


def _slow_log_joint(model, Y, X, u, entry):
    """One datum and one output at a time, over observed entries only."""
    Z, k = model.inducing_points, model.kernel
    Luu = torch.linalg.cholesky(k(Z) + 1e-8 * model.kernel.variance * torch.eye(M))
    total = dist.Normal(0.0, 1.0).log_prob(X).sum() + dist.Normal(0.0, 1.0).log_prob(u).sum()
    for n in range(len(Y)):
        x = X[n : n + 1]
        A = torch.linalg.inv(Luu) @ k(Z, x)
        s = k(x)[0, 0] - (A * A).sum()
        for d in range(D):
            if not torch.isnan(Y[n, d]):
                total = total + entry(Y[n, d], A[:, 0] @ u[d], s, model.likelihood.variance)
    return total


ENTRY = {
    "svgp": lambda y, m, s, v: dist.Normal(m, v.sqrt()).log_prob(y) - s / (2 * v),
    "fitc": lambda y, m, s, v: dist.Normal(m, (s + v).sqrt()).log_prob(y),
}


@pytest.mark.parametrize("term", ENTRY)
@pytest.mark.parametrize("holes", [False, True])
def test_log_joint_and_gradients_against_a_loop_over_observed_entries(Y, term, holes):
    Y = _holes(Y) if holes else Y
    model = _model(likelihood_term=term)
    X, u = torch.randn(N, Q, requires_grad=True), torch.randn(D, M, requires_grad=True)
    fast, slow = _log_joint(model, Y, X, u), _slow_log_joint(model, Y, X, u, ENTRY[term])
    torch.testing.assert_close(fast, slow)
    variables = [X, u, *model.parameters()]
    for a, b in zip(*(torch.autograd.grad(value, variables) for value in (fast, slow)), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_sampled_term_is_unbiased(Y):
    X, u = torch.randn(N, Q), torch.randn(D, M)
    model = _model()
    exact = _log_joint(model, Y, X, u)
    model.likelihood_term = "sampled"
    draws = torch.stack([_log_joint(model, Y, X, u) for _ in range(2000)]).detach()
    assert abs(draws.mean() - exact) < 4 * draws.std() / 2000**0.5


def test_mini_batches_are_exact(Y):
    """The average over a partition of N/B times the batch is the full-batch log joint."""
    model, X, u = _model(), torch.randn(N, Q), torch.randn(D, M)
    log_u = dist.Normal(0.0, 1.0).log_prob(u).sum()
    parts = [_log_joint(model, Y[i], X[i], u, i) - log_u for i in torch.randperm(N).split(4)]
    torch.testing.assert_close(sum(parts) / len(parts), _log_joint(model, Y, X, u) - log_u)


def test_mean_field_bound_at_one_dimension_equals_integration(Y):
    """E over u in closed form, E over x on a grid, KLs in closed form."""
    Y = _holes(Y)
    model = _model(latent_dim=1, likelihood=Gaussian(0.3))
    guide = MeanFieldGuide(model, init_scale=0.6)
    guide(Y)
    guide.locs.u = torch.randn(D, M)
    guide.locs.X = torch.randn(N, 1)
    with torch.no_grad():
        estimates = torch.tensor([-TraceMeanField_ELBO().loss(model, guide, Y) for _ in range(3000)])
        m, S = guide.locs.u, guide.scales.u @ guide.scales.u.mT
        loc, scale, noise = guide.locs.X, guide.scales.X, model.likelihood.variance
        Z, k = model.inducing_points, model.kernel
        Luu = torch.linalg.cholesky(k(Z) + 1e-8 * torch.eye(M))
        grid = torch.linspace(-8, 8, 1001)
        bound = -torch.distributions.kl_divergence(
            dist.MultivariateNormal(m, scale_tril=guide.scales.u), dist.MultivariateNormal(torch.zeros(M), torch.eye(M))
        ).sum()
        bound -= torch.distributions.kl_divergence(dist.Normal(loc, scale), dist.Normal(0.0, 1.0)).sum()
        for n in range(N):
            x = (loc[n] + scale[n] * grid)[:, None]
            A = torch.linalg.solve(Luu, k(Z, x))
            for d in range(D):
                if torch.isnan(Y[n, d]):
                    continue
                f_variance = 1.0 - (A * A).sum(0) + torch.einsum("mg,mk,kg->g", A, S[d], A)
                term = dist.Normal(A.mT @ m[d], noise.sqrt()).log_prob(Y[n, d]) - f_variance / (2 * noise)
                bound += torch.trapezoid(dist.Normal(0.0, 1.0).log_prob(grid).exp() * term, grid)
    assert abs(estimates.mean() - bound) < 4 * estimates.std() / len(estimates) ** 0.5


def test_predict_equals_exact_regression_when_every_input_is_an_inducing_point():
    """With Z = X and the optimal q(u), the sparse model is exact Gaussian process regression."""
    X, X_new, y = torch.randn(M, 1), torch.randn(7, 1), torch.randn(M, 1)
    model = BayesianGPLVM(M, 1, 1, RBF(1, lengthscale=0.7), num_inducing=M, likelihood=Gaussian(0.2))
    model.inducing_points = X
    k, noise = model.kernel, 0.2
    A = torch.linalg.cholesky(k(X)).mT
    precision = torch.eye(M) + A @ A.mT / noise
    guide = MeanFieldGuide(model)
    guide(y)
    guide.locs.u = torch.linalg.solve(precision, A @ y / noise).mT
    guide.scales.u = torch.linalg.cholesky(torch.linalg.inv(precision))[None]
    with torch.no_grad():
        K = k(X) + noise * torch.eye(M)
        mean = k(X_new, X) @ torch.linalg.solve(K, y)
        variance = (1.0 - (k(X_new, X) * torch.linalg.solve(K, k(X, X_new)).mT).sum(-1, keepdim=True)) + noise
    prediction = model.predict(guide, X_new, num_samples=2000)
    assert ((prediction.mean - mean).abs() < 4.5 * (variance / 2000).sqrt()).all()
    torch.testing.assert_close(prediction.variance, variance, rtol=0.1, atol=0.0)


def test_infer_latents_equals_factor_analysis_for_a_linear_kernel():
    """Given u, a linear kernel with M ≥ Q makes x | y Gaussian: precision I + WᵀW/σ², W the rows of weights seen."""
    model = _model(kernel=Linear(Q), likelihood=Gaussian(0.5))
    guide = MeanFieldGuide(model, init_scale=1e-4)
    y = torch.randn(N, D)
    guide(y)
    guide.locs.u = torch.randn(D, M)
    with torch.no_grad():
        unit = model.predict(guide, torch.eye(Q)).f_mean.mT  # W [D, Q], as f is linear in x
    Y_new = _holes(torch.randn(6, D))
    q = model.infer_latents(guide, Y_new, num_steps=4000, learning_rate=0.02).base_dist
    for n in range(6):
        W = unit[~torch.isnan(Y_new[n])]
        precision = torch.eye(Q) + W.mT @ W / 0.5
        loc = torch.linalg.solve(precision, W.mT @ Y_new[n][~torch.isnan(Y_new[n])] / 0.5)
        torch.testing.assert_close(q.loc[n], loc, rtol=0.0, atol=0.05)
        torch.testing.assert_close(q.scale[n], precision.diagonal().rsqrt(), rtol=0.1, atol=0.0)


def test_infer_latents_finds_both_modes_under_a_mixture_prior():
    """Given u, a linear kernel makes the posterior under a mixture of Gaussians another one, in closed form."""
    model = _model(kernel=Linear(Q), likelihood=Gaussian(0.5))
    guide = MeanFieldGuide(model, init_scale=1e-4)
    guide(torch.randn(N, D))
    guide.locs.u = 0.3 * torch.randn(D, M)
    with torch.no_grad():
        W = model.predict(guide, torch.eye(Q)).f_mean.mT
    means, scale = torch.tensor([[-2.0] * Q, [2.0] * Q]), 0.3
    prior = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.7, 0.3])), dist.Normal(means, scale).to_event(1))
    Y_new = 0.3 * torch.randn(5, D)
    q = model.infer_latents(guide, Y_new, prior=prior, num_starts=40)
    for n, y in enumerate(Y_new):
        evidence = dist.MultivariateNormal(means @ W.mT, scale**2 * W @ W.mT + 0.5 * torch.eye(D))
        weight = (torch.tensor([0.7, 0.3]).log() + evidence.log_prob(y)).softmax(0)
        gain = scale**2 * W.mT @ torch.linalg.inv(scale**2 * W @ W.mT + 0.5 * torch.eye(D))
        loc = means + (y - means @ W.mT) @ gain.mT
        found = q.component_distribution.mean[n]
        share = q.mixture_distribution.probs[n]
        for k in range(2):
            at = (found - loc[k]).norm(dim=-1) < 0.2
            assert share[at].sum().item() == pytest.approx(weight[k].item(), abs=0.05)
    filled = model.impute(guide, Y_new.masked_fill(torch.rand(Y_new.shape) < 0.3, torch.nan), latents=q)
    assert filled.mean.isfinite().all()


def test_infer_latents_wants_as_many_candidates_as_starts(Y):
    model = _model()
    guide = MeanFieldGuide(model)
    guide(Y)
    with pytest.raises(ValueError, match=f"at most {M} starts"):
        model.infer_latents(guide, Y, num_starts=M + 1)


def test_infer_latents_leaves_model_guide_and_random_state_alone(Y):
    model = _model()
    guide = MeanFieldGuide(model)
    guide(Y)
    Y_new = torch.randn(30, D)  # more rows than the model has data
    before = {k: v.clone() for k, v in [*model.state_dict().items(), *guide.state_dict().items()]}
    state = torch.get_rng_state()
    model.infer_latents(guide, Y_new, num_steps=3)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in [*model.state_dict().items(), *guide.state_dict().items()]:
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in [*model.parameters(), *guide.parameters()])


def test_predictions_want_draws_and_latents_that_fit(Y, unchecked):
    model = BayesianGPLVM(len(Y), D, 2, num_inducing=5).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    for predict in (partial(model.predict, guide, torch.randn(3, 2)), partial(model.reconstruct, guide, Y)):
        with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
            predict(num_samples=0)
    with pytest.raises(ValueError, match=r"expected X of shape \[rows, 2\], got \[3, 5\]"):
        model.predict(guide, torch.randn(3, 5))
    for latents in (torch.randn(1, 2), dist.Normal(torch.zeros(1, 2), 1.0).to_event(1)):
        with pytest.raises(ValueError, match=r"expected latents \[3, 2\], one for each row, got \[1, 2\]"):
            model.impute(guide, Y[:3], latents=latents)
    of_one_row = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    for use in (lambda: model.predict(guide, of_one_row), lambda: model.impute(guide, Y[:2], latents=of_one_row)):
        with pytest.raises(ValueError, match=r"got \[2\]; a distribution of one row's needs \.expand\(\[rows\]\)"):
            use()
    assert model.predict(guide, of_one_row.expand([4])).mean.shape == (4, D)
    for prior in (dist.Normal(torch.zeros(2), 1.0), dist.Normal(torch.zeros(3), 1.0).to_event(1)):
        with pytest.raises(ValueError, match=r"expected a prior of one row's 2 latents"):
            model.infer_latents(guide, Y[:3], prior=prior)
    with pytest.raises(ValueError, match="expected num_steps of 0 or more, got -3"):
        model.infer_latents(guide, Y[:3], num_steps=-3)


def test_rows_outside_the_support_of_the_likelihood_are_refused():
    Y = torch.poisson(torch.full((12, D), 3.0))
    model = BayesianGPLVM(len(Y), D, 2, num_inducing=5, likelihood=Poisson()).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    for value, message in ((-5.0, "expected counts 0, 1, …, got -5"), (torch.inf, "expected finite entries")):
        new = Y.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(value))
        for use in (model.infer_latents, model.reconstruct, model.impute):
            with pytest.raises(ValueError, match=message):
                use(guide, new)


class _OfCompleteRows(nn.Module):
    """An encoder with no place for gaps, and statistics of a batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, y):
        loc, raw = self.net(y).chunk(2, -1)
        return loc, nn.functional.softplus(raw)


@pytest.mark.parametrize("kind", ["mean field", "annealed", "random features, collapsed", "random features, explicit"])
def test_predictions_ask_no_encoder_about_rows_that_are_not_there(kind):
    Y, encoder = torch.randn(12, D), _OfCompleteRows()
    if kind.startswith("random"):
        model = RandomFeatureLVM(12, D, 2, num_frequencies=4).initialize(Y)
        guide = RandomFeatureGuide(model, weights=kind.split(", ")[1], encoders={"X": encoder})
    else:
        model = BayesianGPLVM(12, D, 2, num_inducing=5).initialize(Y)
        guide = MeanFieldGuide(model, encoders={"X": encoder})
        guide = AutoAnnealedLangevin(model, num_steps=2, base_guide=guide) if kind == "annealed" else guide
    guide(Y)
    latents = model.infer_latents(guide, Y[:4], num_steps=0)
    torch.testing.assert_close(latents.mean, encoder.eval()(Y[:4])[0].detach())
    for mean in (model.predict(guide, latents).mean, model.predictive(guide, torch.zeros(2, 2)).mean):
        assert mean.isfinite().all()


def test_predictions_run_in_evaluation_mode(Y):
    """Dropout is off, running statistics stay as they are, and each module is in its own mode afterwards."""
    model = _model().initialize(Y)
    encoder = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5), IndexNet(D, Q))
    guide = MeanFieldGuide(model, encoders={"X": encoder})
    guide(Y)
    encoder[0].eval()  # a part that is held
    before = copy.deepcopy(encoder.state_dict()), [part.training for part in guide.modules()]

    def predictions():
        latents = model.infer_latents(guide, Y, num_steps=0)
        with seeded(0):
            return latents.mean, model.reconstruct(guide, Y).mean, model.predict(guide, latents).mean

    in_training = predictions()
    torch.testing.assert_close((encoder.state_dict(), [part.training for part in guide.modules()]), before)
    guide.eval()
    torch.testing.assert_close(in_training, predictions())


@pytest.mark.parametrize("model_of", [BayesianGPLVM, RandomFeatureLVM])
def test_wild_entries_do_not_lead_the_start_under_tails(model_of):
    """Latents to start from, and column means, explain what lies below the wild entries."""
    clean = torch.randn(100, 2) @ torch.randn(2, 6) + 2.0
    Y = torch.where(torch.rand(100, 6) < 0.03, 1000.0, clean + 0.1 * torch.randn(100, 6))
    size = {"num_inducing": 5} if model_of is BayesianGPLVM else {"num_frequencies": 5}
    model = model_of(100, 6, 2, likelihood=StudentT(), **size).initialize(Y)
    assert ((model.mean - clean.mean(0)).abs() < 0.3).all()
    X = torch.cat([model.initial_values["X"], torch.ones(100, 1)], 1)
    left = clean - X @ torch.linalg.lstsq(X, clean).solution
    assert left.var() < 0.02 * clean.var()


def test_globals_are_those_of_the_guide():
    """Moments of what is drawn for predictions, and of the guide's own draws."""
    Y = torch.randn(12, D)
    for make in (MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=2)):
        pyro.clear_param_store()
        model = BayesianGPLVM(12, D, 2, num_inducing=5).initialize(Y)
        model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 0.3).expand([2]).to_event(1))
        guide = make(model)
        own = [guide(Y) for _ in range(400)]
        drawn = list(model._global_draws(guide, 400))
        assert drawn[0].keys() == {"u", "kernel.lengthscale"}
        for name in drawn[0]:
            a, b = (torch.stack([draw[name] for draw in draws]).detach() for draws in (own, drawn))
            error = ((a.var(0) + b.var(0)) / 400).sqrt()
            assert ((a.mean(0) - b.mean(0)).abs() < 5.0 * error).all(), name


def test_predictions_refuse_guides_that_lack_a_site(Y):
    model = BayesianGPLVM(len(Y), D, 2, num_inducing=5).initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    X = torch.zeros(2, 2)
    for use in (lambda: model.predict(guide, X), lambda: model.predictive(guide, X), lambda: model.reconstruct(guide, Y)):
        with pytest.raises(
            ValueError, match=r"a guide that knows all latent sites .* got one without \['kernel.lengthscale'\]"
        ):
            use()


def test_predictions_want_moments_from_a_model_of_one_s_own():
    class Linear(LatentVariableModel):
        likelihood = Gaussian(0.1)

        def latent_candidates(self):
            return torch.zeros(1, 2)

        def forward(self, y=None, idx=None):
            with self.data_plate(y, idx):
                X = pyro.sample("X", dist.Normal(torch.zeros(2), 1.0).to_event(1))
                return pyro.sample("y", dist.Normal(X, 0.3).to_event(1), obs=y)

    Y = torch.zeros(3, 2)
    model = Linear(3, 2, 2)
    guide = MeanFieldGuide(model)
    guide(Y)
    for use in (lambda: model.predict(guide, Y), lambda: model.predictive(guide, Y), lambda: model.reconstruct(guide, Y)):
        with pytest.raises(TypeError, match=r"around a LikelihoodPredictive at the site 'y' .* got Independent\(Normal"):
            use()


@pytest.mark.parametrize("of", ["kernel", "likelihood"])
def test_initial_values_under_priors_are_those_of_the_seed(of):
    Y = torch.poisson(torch.full((20, D), 3.0))

    def start(state):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = BayesianGPLVM(20, D, 2, num_inducing=5, likelihood=NegativeBinomial())
        if of == "kernel":
            model.kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        else:
            model.likelihood.dispersion = PyroSample(dist.LogNormal(1.0, 1.0))
        torch.manual_seed(state)
        model.initialize(Y, seed=0)
        return model.mean, model.initial_values["u"]

    for one, other in zip(start(1), start(2), strict=True):
        assert torch.equal(one, other)


def test_impute_keeps_what_is_observed(Y):
    model = _model().initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    holes = _holes(Y)
    for filled in (
        model.impute(guide, holes, num_samples=4),
        model.impute(guide, holes[:4], torch.arange(4), num_samples=4),
        model.impute(guide, holes, latents=model.infer_latents(guide, holes, num_steps=2), num_samples=4),
    ):
        seen = ~torch.isnan(holes[: len(filled.mean)])
        assert torch.equal(filled.mean[seen], holes[: len(filled.mean)][seen])
        assert (filled.variance[seen] == 0).all()
        assert (filled.variance[~seen] > 0).all()
        assert filled.mean.isfinite().all()


def test_initialize_reconstructs_like_pca_and_guides_start_there():
    X = torch.randn(60, 2)
    Y = X @ torch.randn(2, 6) + 0.05 * torch.randn(60, 6) + 3.0
    Y[torch.rand(Y.shape) < 0.1] = torch.nan
    for method in ("pca", "factor-analysis"):
        pyro.clear_param_store()
        model = BayesianGPLVM(60, 6, 2, RBF(2, lengthscale=3.0), num_inducing=20).initialize(Y, method=method)
        guide = MeanFieldGuide(model)
        error = (model.reconstruct(guide, Y, num_samples=4).mean - Y).square().nanmean()
        assert error < 0.05 * Y[~torch.isnan(Y)].var()


def test_priors_on_hyperparameters_with_and_without_vectorised_particles(Y):
    model = _model()
    model.kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(Q), 0.3).to_event(1))
    model.kernel.variance = PyroSample(dist.LogNormal(0.0, 0.3))
    model.likelihood.variance = PyroSample(dist.LogNormal(-1.0, 0.3))
    guide = MeanFieldGuide(model)
    guide(Y)
    loop = torch.tensor([Trace_ELBO().loss(model, guide, Y) for _ in range(1500)])
    vectorised = Trace_ELBO(num_particles=1500, vectorize_particles=True, max_plate_nesting=1).loss(model, guide, Y)
    assert abs(loop.mean() - vectorised) < 4 * (2**0.5) * loop.std() / 1500**0.5
    assert set(guide.median()) == {"kernel.lengthscale", "kernel.variance", "likelihood.variance", "u", "X"}


@pytest.mark.parametrize(
    "likelihood",
    [Bernoulli(), Poisson(), NegativeBinomial(), Binomial(4), Gaussian(), LogNormal(), StudentT()],
    ids=lambda x: type(x).__name__,
)
def test_every_likelihood_trains_with_holes(likelihood, dtype):
    torch.set_default_dtype(dtype)
    likelihood = likelihood.to(dtype)
    Y = _holes(likelihood(torch.randn(N, D)).sample())
    model = _model(likelihood=likelihood).initialize(Y)
    guide = MeanFieldGuide(model)
    loss = TraceMeanField_ELBO()(model, guide)
    value = loss(Y)
    value.backward()
    assert value.dtype == dtype
    for name, parameter in loss.named_parameters():
        assert parameter.grad.isfinite().all(), name
    assert Predictive(model, guide=guide, num_samples=3)(None)["y"].shape == (3, N, D)
    assert model.reconstruct(guide, Y, num_samples=2).mean.dtype == dtype


def test_generate():
    trace = poutine.trace(_model()).get_trace()
    assert trace.nodes["u"]["value"].shape == (D, M)
    assert trace.nodes["X"]["value"].shape == (N, Q)
    assert trace.nodes["y"]["value"].shape == (N, D)


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"likelihood": "gaussian"}, TypeError, r"expected a likelihood, got 'gaussian'; make one, such as Gaussian\(\)"),
            ({"likelihood": Gaussian}, TypeError, "expected a likelihood, got <class"),
            ({"likelihood": Gaussian(0.1, data_dim=D + 1)}, ValueError, f"of {D} outputs, got one with {D + 1} parameters"),
            ({"kernel": RBF(Q, batch_shape=(4,))}, ValueError, r"one kernel for all outputs, got a batch of shape \[4\]"),
            ({"kernel": RBF(Q + 1)}, ValueError, f"expected X with {Q + 1} columns, got {Q}; make the kernel by RBF"),
            ({"kernel": 1.0 + RBF(Q) * RBF(Q + 1)}, ValueError, f"expected X with {Q + 1} columns, got {Q}"),
            ({"kernel": RBF(1, active_dims=[Q])}, ValueError, f"expected X with at least {Q + 1} columns, got {Q}"),
        ],
    )
    def test_parts_that_do_not_fit(self, options, error, match):
        with pytest.raises(error, match=match):
            BayesianGPLVM(N, D, Q, num_inducing=M, **options)

    def test_new_rows_without_latents(self, Y):
        model = _model().initialize(Y)
        guide = MeanFieldGuide(model)
        guide(Y)
        with pytest.raises(ValueError, match=r"got 5 rows and no idx; .* impute\(guide, Y, latents=model.infer_latents"):
            model.impute(guide, Y[:5] + 1.0)

    def test_latents_of_another_kind(self, Y):
        with pytest.raises(TypeError, match=r"expected data to be tensors, got list; use torch.as_tensor"):
            _model().initialize(Y, latents=[[0.0] * Q] * N)

    def test_no_latents_to_predict_at(self, Y):
        model = _model()
        guide = MeanFieldGuide(model)
        guide(Y)
        with pytest.raises(ValueError, match="expected X with one row or more, got none"):
            model.predict(guide, torch.zeros(0, Q))

    @pytest.mark.parametrize(
        ("X", "error", "match"),
        [
            (np.zeros((2, Q)), TypeError, "expected X to be a torch.Tensor, got ndarray; use torch.as_tensor"),
            (torch.zeros(2, Q).float(), TypeError, "expected X of the model's dtype torch.float64, got torch.float32"),
            (torch.zeros(2, Q + 1).double(), ValueError, rf"expected X of shape \[rows, {Q}\], got \[2, {Q + 1}\]"),
            (torch.full((2, Q), torch.nan).double(), ValueError, r"expected finite latents, .* infer_latents\(...\)"),
        ],
    )
    def test_latents_to_predict_at(self, X, error, match, unchecked):
        model = _model()
        guide = MeanFieldGuide(model)
        guide()
        for predict in (model.predict, model.predictive):
            with pytest.raises(error, match=match):
                predict(guide, X)

    @pytest.mark.parametrize(
        ("bad", "error", "match"),
        [
            (lambda Y: Y[:, :2], ValueError, r"shape \[rows, 3\], got \[12, 2\]"),
            (lambda Y: Y[0], ValueError, r"got \[3\]"),
            (lambda Y: Y[:0], ValueError, "one row or more, got none"),
            (lambda Y: Y[:5], ValueError, "mini-batch with its indices"),
            (lambda Y: Y.numpy(), TypeError, "torch.as_tensor"),
            (lambda Y: Y.long(), TypeError, r"floating-point .* got torch.int64; use .float\(\)"),
            (lambda Y: Y.half(), TypeError, r"torch.float32 or torch.float64, got torch.float16; use .float\(\)"),
            (lambda Y: Y.float(), TypeError, "model's dtype torch.float64, got torch.float32"),
            (lambda Y: Y.to("meta"), ValueError, "device"),
            (lambda Y: torch.where(Y[3, 1] == Y, torch.inf, Y), ValueError, r"got inf at y\[3, 1\]"),
        ],
    )
    def test_forward(self, Y, bad, error, match):
        with pytest.raises(error, match=match):
            _model()(bad(Y))

    @pytest.mark.parametrize(
        ("idx", "error", "match"),
        [
            (torch.tensor([0, 12]), IndexError, r"0…11, got 0…12"),
            (torch.tensor([-1, 2]), IndexError, r"got -1…2"),
            (torch.tensor([0]), ValueError, "one index for each of 2 rows"),
            (torch.tensor([0.0, 1.0]), ValueError, "torch.long"),
        ],
    )
    def test_index(self, Y, idx, error, match):
        with pytest.raises(error, match=match):
            _model()(Y[:2], idx)

    def test_row_or_column_all_missing(self, Y):
        for row in (True, False):
            holes = Y.clone()
            holes[(4, slice(None)) if row else (slice(None), 1)] = torch.nan
            with pytest.raises(ValueError, match="row 4" if row else "column 1"):
                _model().initialize(holes)

    def test_negative_count(self, Y):
        with pytest.raises(ValueError, match="expected counts"):
            _model(likelihood=Poisson())(-Y.abs().ceil() - 1)

    def test_sizes(self):
        with pytest.raises(ValueError, match="num_inducing=4 or fewer"):
            BayesianGPLVM(4, 2, 1, num_inducing=5)
        with pytest.raises(ValueError, match="latent_dim of 1 or more"):
            BayesianGPLVM(4, 2, 0, num_inducing=2)
        with pytest.raises(ValueError, match="likelihood_term"):
            _model(likelihood_term="vfe")

    def test_methods_check_too(self, Y):
        model = _model()
        guide = MeanFieldGuide(model)
        guide(Y)
        with pytest.raises(ValueError, match=r"\[rows, 3\]"):
            model.infer_latents(guide, Y[:, :1])
        with pytest.raises(ValueError, match="indices"):
            model.reconstruct(guide, Y[:3])


def test_inducing_points_with_a_prior_keep_it_and_held_ones_their_places(Y):
    model = _model()
    model.inducing_points = PyroSample(dist.Normal(torch.zeros(M, Q), 1.0).to_event(2))
    guide = MeanFieldGuide(model.initialize(Y))
    guide(Y)
    pyro.clear_param_store()
    torch.testing.assert_close(guide.median()["inducing_points"], _model().initialize(Y).inducing_points)
    model = _model()
    model.inducing_points_unconstrained.requires_grad_(False)
    before = model.inducing_points.clone()
    assert torch.equal(model.initialize(Y).inducing_points, before)


@pytest.mark.parametrize("method", ["variational", "laplace"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_latents_are_inferred_where_gradients_are_off(Y, method, mode):
    model = _model().initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    expected = model.infer_latents(guide, Y, method=method, num_steps=5).mean
    with mode():
        found = model.infer_latents(guide, Y.clone(), method=method, num_steps=5).mean
    assert torch.equal(found, expected)


class TestPriorOfNewRows:
    @pytest.fixture
    def fitted(self, Y):
        model = _model().initialize(Y)
        guide = MeanFieldGuide(model)
        guide(Y)
        return model, guide

    @pytest.mark.parametrize("method", ["variational", "laplace"])
    @pytest.mark.usefixtures("unchecked")
    def test_is_a_distribution_of_the_dtype_of_the_model(self, fitted, Y, method):
        model, guide = fitted
        with pytest.raises(TypeError, match="dtype"):
            model.infer_latents(guide, Y, method=method, prior=dist.Normal(torch.zeros(Q).float(), 1.0).to_event(1))
        with pytest.raises(TypeError, match="expected a distribution"):
            model.infer_latents(guide, Y, method=method, prior="n")

    @pytest.mark.parametrize("num_starts", [1, 2])
    @pytest.mark.parametrize("method", ["variational", "laplace"])
    def test_may_be_a_mixture_of_torch(self, fitted, Y, method, num_starts):
        model, guide = fitted
        found = []
        for family in (dist, torch.distributions):
            parts = family.Independent(family.Normal(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), 1.0), 1)
            prior = family.MixtureSameFamily(family.Categorical(torch.ones(2)), parts)
            found.append(model.infer_latents(guide, Y, method=method, prior=prior, num_starts=num_starts, num_steps=5).mean)
        torch.testing.assert_close(*found)
