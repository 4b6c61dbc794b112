"""Models of rows under a low-rank-plus-diagonal residual covariance, with missing entries."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch.distributions import MultivariateNormal

from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, JointAdam, MeanFieldELBO, fit
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian, LowRankGaussian
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM, RowArguments
from tests.helpers.particles import log_joints_of_draws

pytestmark = pytest.mark.usefixtures("float64")
N, D, Q, r, M = 12, 4, 2, 2, 5


class Unknown(LowRankGaussian):
    """The same likelihood as somebody else's: the model does not know its quadratic form."""


def data() -> torch.Tensor:
    Y = torch.randn(N, D)
    Y[2, 1] = Y[5, 0] = Y[5, 3] = Y[7, :3] = torch.nan
    return Y


def likelihood(kind: type[LowRankGaussian] = LowRankGaussian) -> LowRankGaussian:
    result = kind(r, D, variance=0.2 + torch.rand(D))
    result.cov_factor = torch.randn(D, r)
    return result


def gplvm(own: LowRankGaussian | Gaussian | None = None, **options) -> BayesianGPLVM:
    return BayesianGPLVM(N, D, Q, num_inducing=M, likelihood=own or likelihood(), **options)


def covariance(model) -> torch.Tensor:
    return model.likelihood.cov_factor @ model.likelihood.cov_factor.mT + model.likelihood.cov_diag.diag()


def log_joint(model, Y, X, u, idx=None):
    return poutine.trace(poutine.condition(model, {"X": X, "u": u})).get_trace(Y, idx).log_prob_sum()


def dense_log_joint(model, Y, X, u, term, errors=None):
    """One row at a time, with the dense covariance of its observed entries."""
    Z, k = model.inducing_points, model.kernel
    Luu = torch.linalg.cholesky(k(Z) + 1e-8 * k.variance * torch.eye(M))
    total = dist.Normal(0.0, 1.0).log_prob(X).sum() + dist.Normal(0.0, 1.0).log_prob(u).sum()
    for n, y in enumerate(Y):
        a = (torch.linalg.inv(Luu) @ k(Z, X[n : n + 1]))[:, 0]
        s = k(X[n : n + 1])[0, 0] - a @ a
        o = ~torch.isnan(y)
        S = (covariance(model) if errors is None else covariance(model) + errors[n].square().diag())[o][:, o]
        if term == "fitc":
            S = S + s * torch.eye(int(o.sum()))
        total = total + MultivariateNormal((u @ a)[o], S).log_prob(y[o])
        if term == "svgp":
            total = total - 0.5 * s * torch.linalg.inv(S).trace()
    return total


@pytest.mark.parametrize("kind", [LowRankGaussian, Unknown])
@pytest.mark.parametrize("term", ["svgp", "fitc"])
@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("with_errors", [True, False])
def test_log_joint_and_gradients_are_those_of_dense_covariances(kind, term, gaps, with_errors):
    Y, errors = data() if gaps else torch.randn(N, D), torch.rand(N, D) if with_errors else None
    rows = RowArguments(standard_error=errors) if with_errors else None
    model = gplvm(likelihood(kind), likelihood_term=term, rows=rows)
    X, u = torch.randn(N, Q, requires_grad=True), torch.randn(D, M, requires_grad=True)
    found, dense = log_joint(model, Y, X, u), dense_log_joint(model, Y, X, u, term, errors)
    torch.testing.assert_close(found, dense)
    variables = [X, u, *model.parameters()]
    for one, other in zip(*(torch.autograd.grad(value, variables) for value in (found, dense)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_the_sampled_term_is_unbiased():
    Y, X, u = data(), torch.randn(N, Q), torch.randn(D, M)
    model = gplvm()
    exact = log_joint(model, Y, X, u)
    model.likelihood_term = "sampled"
    draws = log_joints_of_draws(model, Y, X, u, 300)
    assert abs(draws.mean() - exact) < 4.0 * draws.std() / 300**0.5


def test_mini_batches_are_exact():
    """The average over a partition of N/B times the batch is the log joint of all rows."""
    Y, X, u, model = data(), torch.randn(N, Q), torch.randn(D, M), gplvm()
    log_u = dist.Normal(0.0, 1.0).log_prob(u).sum()
    parts = [log_joint(model, Y[i], X[i], u, i) - log_u for i in torch.randperm(N).split(4)]
    torch.testing.assert_close(sum(parts) / len(parts), log_joint(model, Y, X, u) - log_u)


BOUNDS = {
    "mean field": MeanFieldELBO(max_plate_nesting=1),
    "importance-weighted": ImportanceWeightedELBO(num_samples=3, max_plate_nesting=1),
    "importance-weighted, drawn": ImportanceWeightedELBO(num_samples=3, marginalize=False, max_plate_nesting=1),
    "Pyro's": Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1),
    "Pyro's mean field": TraceMeanField_ELBO(),
}


def bound_and_gradients(bound, model, guide, Y):
    torch.manual_seed(1)
    idx = torch.tensor([2, 5, 0, 7])
    value = bound.differentiable_loss(model, guide, Y[idx], idx)
    value.backward()
    parts = {**dict(model.named_parameters()), **dict(guide.named_parameters(prefix="guide"))}
    return value, {name: p.grad for name, p in parts.items()}


@pytest.mark.parametrize("make_guide", [MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=2)])
@pytest.mark.parametrize("bound", BOUNDS)
def test_bounds_by_the_quadratic_form_are_those_by_rows(bound, make_guide):
    results = []
    for kind in (LowRankGaussian, Unknown):
        pyro.clear_param_store()
        torch.manual_seed(0)
        Y, model = data(), gplvm(likelihood(kind))
        guide = make_guide(model.initialize(Y))
        guide(Y)
        results.append(bound_and_gradients(BOUNDS[bound], model, guide, Y))
    (value, gradients), (want, want_gradients) = results
    torch.testing.assert_close(value, want)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("rows", [None, RowArguments(standard_error=torch.linspace(0.0, 2.0, N, dtype=torch.float64))])
def test_score_is_the_gradient_of_the_log_joint(rows):
    Y, model = data(), gplvm(rows=rows)
    X = torch.randn(3, N, Q)
    with poutine.condition(data={"u": torch.randn(D, M)}):
        statistics = model.statistics(Y)
    assert statistics.score is not None  # the closed form
    want = torch.func.grad(lambda X: model.log_joint({"X": X}, statistics).sum())(X)
    torch.testing.assert_close(model.score({"X": X}, statistics)["X"], want)


@pytest.mark.parametrize("kind", ["GPLVM", "random features"])
def test_without_factors_bounds_are_those_of_the_gaussian(kind):
    Y, noise, values = data(), 0.2 + torch.rand(D), []
    for own in (Gaussian(noise, data_dim=D), LowRankGaussian(0, D, variance=noise)):
        pyro.clear_param_store()
        torch.manual_seed(0)
        if kind == "GPLVM":
            model = gplvm(own)
            guide = MeanFieldGuide(model)
        else:
            model = RandomFeatureLVM(N, D, Q, num_frequencies=3, likelihood=own)
            guide = RandomFeatureGuide(model, weights="explicit")
        guide(Y)
        torch.manual_seed(1)
        values.append(MeanFieldELBO().differentiable_loss(model, guide, Y))
    torch.testing.assert_close(*values)


def certain(model) -> MeanFieldGuide:
    """A guide of one value of all sites."""
    guide = MeanFieldGuide(model, init_scale=1e-7)
    guide(data())
    guide.locs.u, guide.locs.X = torch.randn(D, M), torch.randn(N, Q)
    return guide


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("errors", [None, torch.linspace(0.0, 2.0, N * D, dtype=torch.float64).reshape(N, D)])
def test_imputations_are_those_of_the_dense_normal(new, errors):
    """Given latents and inducing outputs, y_n is normal with the covariance W Wᵀ + Ψ + s I, plus squares of errors."""
    rows = None if errors is None else RowArguments(standard_error=errors)
    Y, model = data(), gplvm(rows=rows)
    guide = certain(model)
    X = guide.locs.X.detach()
    of_new = {"latents": X, "rows": rows} if new else {}
    filled = model.impute(guide, Y, **of_new, num_samples=3)
    plain = model.predict(guide, X, rows=rows, num_samples=3)
    for n in (2, 5, 7):
        o = ~torch.isnan(Y[n])
        S = (covariance(model) + plain.f_variance[n].diag()).detach()
        S = S if errors is None else S + errors[n].square().diag()
        gain = torch.linalg.solve(S[o][:, o], S[o][:, ~o]).mT
        want = plain.f_mean[n, ~o] + gain @ (Y[n] - plain.f_mean[n])[o]
        torch.testing.assert_close(filled.mean[n, ~o], want, rtol=0.0, atol=1e-4)
        variance = (S[~o][:, ~o] - gain @ S[o][:, ~o]).diagonal()
        torch.testing.assert_close(filled.variance[n, ~o], variance, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(plain.with_observed(Y).mean, filled.mean, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("with_errors", [False, True])
def test_latents_of_new_rows_have_the_posterior_of_factor_analysis(with_errors):
    """f = A x is linear, so that p(x | y_o) has the precision I + A_oᵀ Σ_oo⁻¹ A_o; Laplace's approximation is exact."""
    errors = 2.0 * torch.rand(3, D) if with_errors else torch.zeros(3, D)
    rows = RowArguments(standard_error=torch.ones(N)) if with_errors else None
    own = {"rows": RowArguments(standard_error=errors)} if with_errors else {}
    model = gplvm(kernel=Linear(Q), rows=rows)
    guide = certain(model)
    with torch.no_grad():
        none = {"rows": RowArguments(standard_error=torch.zeros(1))} if with_errors else {}
        A, S = model.predict(guide, torch.eye(Q), **none).f_mean.mT, covariance(model)
        Y = data()[[0, 5, 7]]
        prior = dist.Normal(torch.zeros(Q), 1.0).to_event(1)
        by_laplace = model.infer_latents(guide, Y, prior=prior, num_steps=5, **own)
        options = {"prior": prior, "num_steps": 300, "learning_rate": 0.1} | own
        variational = model.infer_latents(guide, Y, method="variational", **options)
    for n, y in enumerate(Y):
        o = ~torch.isnan(y)
        precision = torch.linalg.inv((S + errors[n].square().diag())[o][:, o])
        posterior = torch.linalg.inv(torch.eye(Q) + A[o].mT @ precision @ A[o])
        torch.testing.assert_close(by_laplace.covariance_matrix[n], posterior, rtol=0.0, atol=1e-5)
        mean = posterior @ A[o].mT @ precision @ y[o]
        torch.testing.assert_close(by_laplace.mean[n], mean, rtol=0.0, atol=1e-5)
        assert ((variational.mean[n] - mean).abs() < 0.3 * posterior.diagonal().sqrt()).all()


def test_predictive_is_a_distribution_of_rows():
    model = gplvm()
    guide = certain(model)
    X = torch.randn(3, Q, requires_grad=True)
    predictive = model.predictive(guide, X)
    assert (predictive.batch_shape, predictive.event_shape) == ((3,), (D,))
    (slope,) = torch.autograd.grad(predictive.log_prob(torch.randn(3, D)).sum(), X)
    assert slope.isfinite().all()
    assert (slope != 0.0).all()


def test_a_row_is_a_datum_in_arviz():
    """Its log likelihood is that of its observed entries together."""
    Y, model = data(), gplvm()
    guide = certain(model)
    tree = to_arviz(model, guide, Y, num_samples=3, seed=0)
    found = tree.log_likelihood["y"]
    assert dict(found.sizes) == {"chain": 1, "draw": 3, "data": N}
    trace = poutine.trace(poutine.condition(model, guide.median())).get_trace(Y)
    want = trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"])
    torch.testing.assert_close(torch.as_tensor(found.to_numpy()[0, 0]), want.detach(), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("weights", ["explicit", "shared"])
@pytest.mark.parametrize("errors", [None, torch.linspace(0.0, 1.0, N * D, dtype=torch.float64).reshape(N, D)])
def test_weights_converge_to_the_mean_field_optimum(weights, errors):
    """At fixed features the posterior of all weights is one Gaussian of precision I + Σ_n P_n ⊗ φ φᵀ: q has its mean, and
    the diagonal blocks of its precision, or the mean of these blocks."""
    Y, rows = data(), None if errors is None else RowArguments(standard_error=errors)
    model = RandomFeatureLVM(N, D, Q, num_frequencies=3, likelihood=likelihood(), rows=rows).initialize(Y)
    model.likelihood.cov_factor, model.likelihood.cov_diag = 0.5 * torch.randn(D, r), 0.5 + torch.rand(D)
    assert RandomFeatureGuide(model).weights == "explicit"
    guide = RandomFeatureGuide(model, weights=weights)
    guide(Y)
    with torch.no_grad():
        features = model.features(torch.randn(N, Q), guide.omega.loc)
        for _ in range(200):
            for name, value in guide.a.updated(model, Y, features, rows=rows, is_whole=True).items():
                setattr(guide.a, name, value)
        L = features.shape[-1]
        total, linear = torch.eye(D * L), torch.zeros(D, L)
        for n, (y, phi) in enumerate(zip(Y, features, strict=True)):
            o = ~torch.isnan(y)
            P, S = torch.zeros(D, D), covariance(model) + (0.0 if errors is None else errors[n].square().diag())
            P[o[:, None] & o] = torch.linalg.inv(S[o][:, o]).flatten()
            total = total + torch.kron(P, phi[:, None] * phi)
            linear = linear + (P @ torch.nan_to_num(y - model.mean))[:, None] * phi
        mean = torch.linalg.solve(total, linear.flatten()).reshape(D, L)
        found = guide.a.posterior()
        torch.testing.assert_close(found.mean, mean, rtol=1e-4, atol=1e-5)
        blocks = torch.stack([total.reshape(D, L, D, L)[d, :, d] for d in range(D)])
        blocks = blocks if weights == "explicit" else blocks.mean(0, keepdim=True)
        torch.testing.assert_close(found.precision_tril @ found.precision_tril.mT, blocks, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weights", ["collapsed", "filled"])
def test_weights_in_closed_form_are_refused(weights):
    model = RandomFeatureLVM(N, D, Q, num_frequencies=3, likelihood=likelihood())
    with pytest.raises(ValueError, match=r"expected a Gaussian .* got LowRankGaussian"):
        RandomFeatureGuide(model, weights=weights)


@pytest.mark.parametrize("errors", [torch.zeros(N, D, dtype=torch.float64), torch.ones(N, D, dtype=torch.float64)])
def test_random_features_sum_over_dense_normals(errors):
    Y, rows = data(), RowArguments(standard_error=errors)
    model = RandomFeatureLVM(N, D, Q, num_frequencies=3, likelihood=likelihood(), rows=rows).initialize(Y)
    X, omega, a = torch.randn(N, Q), torch.randn(3, Q), torch.randn(D, 6)
    conditioned = poutine.condition(model, {"X": X, "omega": omega, "a": a})
    trace = poutine.trace(conditioned).get_trace(Y)
    trace.compute_log_prob()
    f, S = model.mean + model.features(X, omega) @ a.mT, covariance(model)
    for n, y in enumerate(Y):
        o = ~torch.isnan(y)
        want = MultivariateNormal(f[n, o], (S + errors[n].square().diag())[o][:, o]).log_prob(y[o])
        torch.testing.assert_close(trace.nodes["y"]["log_prob"][n], want)


def table(num_rows=250, num_columns=12):
    """Two nonlinear latents beside two linear factors; a tenth of all entries is missing, and 15 % are hidden."""
    X = torch.randn(num_rows, 2)
    f = 2.0 * (0.6 * X @ torch.randn(2, num_columns) + 3.0 * torch.rand(num_columns)).sin()
    residual = 0.7 * torch.randn(num_rows, 2) @ torch.randn(2, num_columns)
    Y = f + residual + 0.4 * torch.randn(num_rows, num_columns)
    u = torch.rand(Y.shape)
    return Y, Y.masked_fill(u < 0.25, torch.nan), (u > 0.1) & (u < 0.25)


def fitted(kind, own, seen):
    sizes = {"num_data": len(seen), "data_dim": seen.shape[1], "latent_dim": 2, "likelihood": own}
    if kind == "GPLVM":
        model = BayesianGPLVM(**sizes, num_inducing=20).initialize(seen)
        guide = MeanFieldGuide(model)
        settings = {"loss": MeanFieldELBO(), "optim": JointAdam(lr=0.06), "num_steps": 150}
    else:
        model = RandomFeatureLVM(**sizes, num_frequencies=10).initialize(seen)
        guide = RandomFeatureGuide(model, weights="explicit")
        settings = {"optim": guide.blocks(lr=0.03), "num_steps": 150}
    fit(model, guide, seen, batch_size=125, seed=0, progress=False, compile="torchscript", **settings)
    return model, guide


@pytest.mark.parametrize("kind", ["GPLVM", "random features"])
def test_hidden_entries_are_predicted_better_than_by_independent_noise(kind):
    """Of training rows, and of new rows, whose latents are inferred."""
    Y, seen, hidden = table()
    scores = []
    for own in (Gaussian(data_dim=Y.shape[1]), LowRankGaussian(2, Y.shape[1])):
        pyro.clear_param_store()
        model, guide = fitted(kind, own, seen[:200])
        new = seen[200:]
        latents = model.infer_latents(guide, new, num_steps=100)
        filled = model.impute(guide, seen[:200], num_samples=16), model.impute(guide, new, latents=latents, num_samples=16)
        log_prob = torch.cat([part.log_prob(rows) for part, rows in zip(filled, Y.split(200), strict=True)])
        scores.append(torch.where(hidden, log_prob, 0.0).sum(-1))  # entries of a row are dependent
    gain = scores[1] - scores[0]
    assert gain.mean() > 2.0 * gain.std() / len(gain) ** 0.5
    assert gain[200:].mean() > 0.0


def test_generated_rows_have_the_joint_density_of_their_entries():
    model = gplvm()
    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    y, f = trace.nodes["y"], trace.nodes["y"]["fn"]
    X, u = trace.nodes["X"]["value"], trace.nodes["u"]["value"]
    assert y["value"].shape == (N, D)
    prior = dist.Normal(0.0, 1.0).log_prob(X).sum() + dist.Normal(0.0, 1.0).log_prob(u).sum()
    torch.testing.assert_close(y["log_prob_sum"] + prior, dense_log_joint(model, y["value"], X, u, "svgp"))
    assert (f.batch_shape, f.event_shape) == ((N,), (D,))
