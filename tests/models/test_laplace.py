"""Laplace's approximation of new rows' latents: exact where f is linear, and at a mode elsewhere."""

import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, LogNormal, LowRankGaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM, _laplace, latent_mixture
from pyro_lvgp.models._given_latents import predictor
from pyro_lvgp.models._laplace import laplace
from pyro_lvgp.models._new_rows import _log_likelihood_at

pytestmark = pytest.mark.usefixtures("float64")
N, D, Q, M = 20, 4, 2, 6


def standard_normal():
    return dist.Normal(torch.zeros(Q), 1.0).to_event(1)


@pytest.mark.parametrize("likelihood", [Poisson(), LogNormal(), Gaussian(0.5), LowRankGaussian(1, D)])
@pytest.mark.parametrize("is_discrete", [True, False])
def test_densities_at_shared_points_are_those_row_by_row(likelihood, is_discrete):
    """Also where few distinct values are evaluated once."""
    model, guide, _ = _linear(likelihood.double())
    Y = 1.0 + torch.poisson(torch.ones(30, D))
    if not (is_discrete or isinstance(likelihood, Poisson)):
        Y = Y + torch.rand(30, D)
    Y[torch.rand(30, D) < 0.3] = torch.nan
    Y[:, 1], points = torch.nan, torch.randn(3, Q)
    given = [predictor(model, guide, None)]
    found, want = (_log_likelihood_at(given, Y, points, by_row) for by_row in (False, True))
    torch.testing.assert_close(found, want)
    assert found.isfinite().all()


@pytest.fixture
def holes():
    Y = torch.randn(5, D)
    Y[0, 1:] = Y[1, :2] = Y[2, 0] = torch.nan
    return Y


def _linear(likelihood):
    """A model whose f is linear in x, all but without doubt about it; its guide, and the weights [D, Q]."""
    model = BayesianGPLVM(N, D, Q, kernel=Linear(Q), num_inducing=M, likelihood=likelihood)
    guide = MeanFieldGuide(model, init_scale=1e-6)
    guide(likelihood.distribution(torch.zeros(N, D), likelihood.params()).sample())
    guide.locs.u = torch.randn(D, M)
    with torch.no_grad():
        return model, guide, model.predict(guide, torch.eye(Q)).f_mean.mT


def test_is_the_posterior_of_factor_analysis(holes):
    """p(x | y) has the precision I + WᵀW/σ², W the rows of weights seen."""
    model, guide, W = _linear(Gaussian(0.5))
    q = model.infer_latents(guide, holes, prior=standard_normal(), num_steps=3)
    for n, y in enumerate(holes):
        seen = ~torch.isnan(y)
        covariance = torch.linalg.inv(torch.eye(Q) + W[seen].mT @ W[seen] / 0.5)
        torch.testing.assert_close(q.covariance_matrix[n], covariance, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(q.mean[n], covariance @ W[seen].mT @ y[seen] / 0.5, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("full", [True, False])
def test_is_the_mixture_that_a_mixture_prior_asks_for(holes, full):
    """The posterior is a mixture too, with the evidences N(y; W m_k, W S_k Wᵀ + σ² I) in its weights."""
    model, guide, W = _linear(Gaussian(0.5))
    A = torch.randn(3, Q, Q) if full else torch.diag_embed(torch.rand(3, Q) + 0.1)
    means, S, shares = torch.randn(3, Q), A @ A.mT, torch.tensor([0.5, 0.2, 0.3])
    parts = dist.MultivariateNormal(means, S) if full else dist.Normal(means, A.diagonal(dim1=1, dim2=2)).to_event(1)
    prior = dist.MixtureSameFamily(dist.Categorical(shares), parts)
    q = model.infer_latents(guide, holes, method="laplace", prior=prior, num_steps=3)
    for n, y in enumerate(holes):
        seen = ~torch.isnan(y)
        C = W[seen] @ S @ W[seen].mT + 0.5 * torch.eye(int(seen.sum()))
        gain = S @ W[seen].mT @ torch.linalg.inv(C)
        residual = y[seen] - means @ W[seen].mT
        evidence = -0.5 * (residual[:, None] @ torch.linalg.inv(C) @ residual[..., None])[:, 0, 0] - 0.5 * torch.logdet(C)
        torch.testing.assert_close(q.mixture_distribution.probs[n], (shares.log() + evidence).softmax(0), rtol=0.0, atol=1e-4)
        found = q.component_distribution
        torch.testing.assert_close(found.mean[n], means + (gain @ residual[..., None])[..., 0], rtol=0.0, atol=1e-4)
        torch.testing.assert_close(found.covariance_matrix[n], S - gain @ W[seen] @ S, rtol=0.0, atol=1e-4)


def test_components_that_remain_are_those_of_the_highest_evidence(holes):
    model, guide, _ = _linear(Gaussian(0.5))
    means = torch.tensor([[-4.0, 0.0], [0.0, 0.0], [4.0, 1.0]])  # evidences differ by more than errors from few draws
    prior = dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.5, 0.2, 0.3])), dist.Normal(means, 0.02 * torch.rand(3, Q) + 0.01).to_event(1)
    )
    all_three, two = (model.infer_latents(guide, holes, method="laplace", prior=prior, max_components=k) for k in (3, 2))
    logits, best = all_three.mixture_distribution.logits.topk(2, -1)
    torch.testing.assert_close(two.mixture_distribution.probs, logits.softmax(-1), rtol=0.0, atol=1e-6)
    expected = all_three.component_distribution.mean.take_along_dim(best[..., None], 1)
    torch.testing.assert_close(two.component_distribution.mean, expected, rtol=0.0, atol=1e-6)
    with pytest.raises(ValueError, match="expected num_starts=1 with max_components, got 2"):
        model.infer_latents(guide, holes, method="laplace", prior=prior, max_components=2, num_starts=2)


def test_several_starts_of_each_component_count_once_where_they_meet(holes):
    model, guide, _ = _linear(Gaussian(0.5))
    parts = dist.Normal(torch.randn(3, Q), torch.rand(3, Q) + 0.1).to_event(1)
    prior = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.5, 0.2, 0.3])), parts)
    one, several = (model.infer_latents(guide, holes, method="laplace", prior=prior, num_starts=number) for number in (1, 4))
    assert several.mixture_distribution.probs.shape == (5, 12)
    torch.testing.assert_close(several.mixture_distribution.probs.unflatten(1, (3, 4)).sum(-1), one.mixture_distribution.probs)
    torch.testing.assert_close(several.mean, one.mean)
    torch.testing.assert_close(several.variance, one.variance)


def test_starts_at_draws_find_what_those_at_means_lead_past():
    """y = cos(3 x), x of one broad component and one far away: the mean of the broad one is a saddle between two modes."""
    model = BayesianGPLVM(60, 1, 1, num_inducing=30, likelihood=Gaussian(1e-3))
    X = torch.linspace(-2.0, 2.0, 60)[:, None]
    guide = MeanFieldGuide(model.initialize((3.0 * X).cos(), latents=X), init_scale=1e-3)
    guide((3.0 * X).cos())
    parts = dist.Normal(torch.tensor([[0.0], [8.0]]), torch.tensor([[1.0], [0.1]])).to_event(1)
    prior = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.9, 0.1])), parts)
    Y = torch.tensor([[0.0]])
    one, several = (model.infer_latents(guide, Y, method="laplace", prior=prior, num_starts=number) for number in (1, 20))
    # X is standardised: the nearest zeros of the function lie at ± π / 6 of its own scale.
    zero = math.pi / 6.0 / X.std(correction=0)
    found = [
        (q.component_distribution.mean[0] - sign * zero).abs().min() < 0.05 for q in (one, several) for sign in (-1.0, 1.0)
    ]
    assert not all(found[:2])
    assert all(found[2:])


@pytest.mark.parametrize("likelihood", [Poisson(), Bernoulli()], ids=["Poisson", "Bernoulli"])
def test_is_mode_and_curvature_of_other_likelihoods(likelihood):
    """Slope zero; where f is linear and known, the precision of Gauss and Newton is minus the Hessian."""
    model, guide, _ = _linear(likelihood)
    Y = likelihood.distribution(torch.randn(5, D), None).sample()
    Y[0, 1] = torch.nan
    q = model.infer_latents(guide, Y, prior=standard_normal())
    X = q.mean.requires_grad_()
    terms = model.predictive(guide, X).log_prob(torch.nan_to_num(Y))
    density = torch.where(torch.isnan(Y), 0.0, terms).sum() + dist.Normal(0.0, 1.0).log_prob(X).sum()
    (slope,) = torch.autograd.grad(density, X, create_graph=True)
    assert slope.abs().max() < 1e-5
    hessian = torch.stack([torch.autograd.grad(column.sum(), X, retain_graph=True)[0] for column in slope.unbind(-1)], -1)
    torch.testing.assert_close(q.precision_matrix, -hessian, rtol=1e-3, atol=1e-4)


def test_steps_never_lower_the_density_and_find_the_mode_of_a_curved_function():
    """y = sin(3 x) + noise, known to a Gaussian process: from bad starts, to a place where the slope is zero."""
    torch.manual_seed(1)
    X = torch.linspace(-2.0, 2.0, 30)[:, None]
    Y = torch.cat([(3.0 * X).sin(), (2.0 * X).cos(), X], -1)
    model = BayesianGPLVM(30, 3, 1, num_inducing=15, likelihood=Gaussian(1e-3)).initialize(Y, latents=X)
    guide = MeanFieldGuide(model, init_scale=1e-3)
    guide(Y)
    entries = partial(model.predictive, guide)
    prior, start = dist.MultivariateNormal(torch.zeros(1, 1), torch.eye(1)[None]), torch.tensor([[[-1.0]], [[1.5]]])
    values = []
    for num_steps in (0, 1, 2, 4, 8, 40):
        loc, scale_tril, evidence = laplace([entries], Y[11:12] + 0.01, prior, start, num_steps=num_steps)
        x = loc[0].requires_grad_()
        value = entries(x).log_prob(Y[11:12] + 0.01).sum(-1) + prior.log_prob(x)
        values.append(value.detach())
        gaussian = dist.MultivariateNormal(loc[0], scale_tril=scale_tril[0])
        torch.testing.assert_close(evidence[0], value - gaussian.log_prob(loc[0]))
    assert (torch.stack(values).diff(dim=0) >= 0.0).all()
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert (slope.abs() * scale_tril[0, :, :, 0] < 1e-3).all()


def test_far_starts_end_at_good_modes_where_latents_outnumber_what_is_seen():
    """y = sin(V x) with little noise, x of six dimensions and y of four: half of long first steps end where sin is flat."""
    Q, S, B = 6, 40, 5
    likelihood, V = Gaussian(3e-4), torch.randn(4, Q)

    def entries(X):
        return LikelihoodPredictive(likelihood, (X @ V.T).sin(), torch.zeros(()), "fitc", likelihood.params())

    Y, start = (torch.randn(B, Q) @ V.T).sin(), torch.randn(S, 1, Q).expand(S, B, Q)
    prior = dist.MultivariateNormal(torch.zeros(1, Q), torch.eye(Q)[None])
    loc, _, _ = laplace([entries], Y, prior, start, num_steps=30)
    with torch.no_grad():
        value = torch.stack([entries(x).log_prob(Y).sum(-1) + prior.log_prob(x) for x in loc.transpose(0, 1)])
    below_best = value.amax(0) - value
    assert below_best.mean() < 5.0
    assert (below_best < 10.0).double().mean() > 0.9


def test_starts_that_meet_count_once(holes):
    model, guide, _ = _linear(Gaussian(0.5))
    one = model.infer_latents(guide, holes, prior=standard_normal())
    several = model.infer_latents(guide, holes, prior=standard_normal(), num_starts=4)
    torch.testing.assert_close(several.mean, one.mean, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(several.variance, one.covariance_matrix.diagonal(dim1=1, dim2=2), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(several.mixture_distribution.probs, torch.full((5, 4), 0.25))


@pytest.mark.parametrize("num_samples", [None, 3])
def test_serves_random_features_and_imputation(holes, num_samples):
    Y = torch.randn(N, D)
    model = RandomFeatureLVM(N, D, Q, num_frequencies=8, num_components=3).initialize(Y)
    guide = RandomFeatureGuide(model)
    guide(Y)
    prior = latent_mixture(guide.median()["X"], 2)
    q = model.infer_latents(guide, holes, method="laplace", prior=prior, num_samples=num_samples)
    filled = model.impute(guide, holes, latents=q)
    assert filled.mean.isfinite().all()
    assert torch.equal(filled.mean[3], holes[3])
    assert (filled.variance[0, 1:] > 0.0).all()


def test_leaves_gradients_and_random_state_alone(holes):
    model, guide, _ = _linear(Gaussian(0.5))
    state = torch.get_rng_state()
    q = model.infer_latents(guide, holes, method="laplace", num_steps=2)
    assert torch.equal(state, torch.get_rng_state())
    assert not q.mean.requires_grad
    assert all(p.grad is None for p in [*model.parameters(), *guide.parameters()])


def test_refuses_what_it_cannot_do(holes, unchecked):
    model, guide, _ = _linear(Gaussian(0.5))
    with pytest.raises(ValueError, match=r"expected method in \('variational', 'laplace'\), got 'exact'"):
        model.infer_latents(guide, holes, method="exact")
    for method in ("laplace", "variational"):
        with pytest.raises(ValueError, match="expected num_samples of 1 or more"):
            model.infer_latents(guide, holes, method=method, num_samples=0)
    heavy = dist.StudentT(4.0, torch.zeros(Q), 1.0).to_event(1)
    with pytest.raises(ValueError, match="expected a Gaussian over vectors or a mixture of them"):
        model.infer_latents(guide, holes, method="laplace", prior=heavy)


@pytest.mark.parametrize("weights", ["collapsed", "filled", "explicit"])
def test_weights_are_integrated_out_of_predictions(weights):
    """With latents and frequencies that are known, by many draws of the weights, which columns have alike."""
    num_columns, num_draws = 24, 250
    Y = torch.randn(12, num_columns)
    model = RandomFeatureLVM(12, num_columns, 2, num_frequencies=4).initialize(Y)
    guide = RandomFeatureGuide(model, weights=weights, frequencies="gaussian")
    guide(Y)
    for part in (guide.X, guide.omega):
        part.scale = torch.full_like(part.scale, 1e-6)
    guide(Y)
    at = torch.randn(5, 2)
    many, exact = model.predict(guide, at, num_samples=num_draws), model.predictive(guide, at)
    assert (exact.f_variance > 0.0).all()
    ratio = many.f_variance / exact.f_variance
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=4.0 * (2.0 / num_draws) ** 0.5, atol=0.0)
    torch.testing.assert_close(ratio.mean(1), torch.ones(5), rtol=4.0 * (2.0 / (num_draws * num_columns)) ** 0.5, atol=0.0)
    error = (exact.f_mean - many.f_mean) / (many.f_variance / num_draws).sqrt()
    assert error.abs().max() < 4.0


@pytest.mark.parametrize(
    "params", [torch.tensor(0.5), torch.rand(D) + 0.1, torch.rand(5, D) + 0.1], ids=["one", "columns", "rows"]
)
def test_blocks_of_rows_give_the_same_result(params, holes, monkeypatch):
    """Parameters of the likelihood of each row are divided with the rows."""
    weights, prior = torch.randn(Q, D), dist.MultivariateNormal(torch.zeros(1, Q), torch.eye(Q).expand(1, Q, Q))

    def given(X, index):
        own = params.double()
        return LikelihoodPredictive(
            Gaussian(), X @ weights, X.square() @ weights.square(), "fitc", own[index] if own.dim() == 2 else own
        )

    results = []
    for size in (1, 2 * D, 100 * D):
        monkeypatch.setattr(_laplace, "MAX_ENTRIES", size)
        results.append(laplace([given], holes, prior, torch.zeros(1, 5, Q), num_steps=5, index=torch.arange(5)))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


class Counting(Poisson):
    """A likelihood that counts the densities that it computes."""

    num_densities = 0

    def log_predictive_density(self, y, mean, variance, params):
        self.num_densities += torch.broadcast_tensors(y, mean)[0].numel()
        return super().log_predictive_density(y, mean, variance, params)

    def log_predictive_derivatives(self, y, mean, variance, params):
        self.num_densities += torch.broadcast_tensors(y, mean)[0].numel()
        return super().log_predictive_derivatives(y, mean, variance, params)


def test_missing_entries_take_no_time():
    Y = torch.arange(40.0)[:, None].repeat(1, D)
    Y[::4, :2] = Y[1::4, 2:] = torch.nan
    model, guide, _ = _linear(likelihood := Counting())
    given, prior = predictor(model, guide, None), dist.MultivariateNormal(torch.zeros(1, Q), torch.eye(Q).expand(1, Q, Q))
    likelihood.num_densities = 0
    _log_likelihood_at([given], Y, torch.randn(3, Q), by_row=False)
    assert likelihood.num_densities == 3 * 30 * D
    likelihood.num_densities = 0
    laplace([given], Y, prior, torch.zeros(1, 40, Q), num_steps=0)
    assert likelihood.num_densities == 30 * D
