"""Densities, bounds and gradients against dense formulas, the model of one view, and the marginal likelihood."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF, Linear, Matern
from pyro_lvgp.likelihoods import Gaussian, LowRankGaussian
from pyro_lvgp.models import BayesianGPLVM, MultiViewGPLVM, RowArguments
from tests.models.multi_view._data import DIMS, INDUCING, N, Q, gaussian_model, low_rank_model, small_model, small_table

pytestmark = pytest.mark.usefixtures("float64")


def sites():
    u = {f"u_{name}": torch.randn(DIMS[name], INDUCING[name]) for name in DIMS}
    return {"X": torch.randn(N, Q), **u}


def log_joint(model, Y, values, idx=None):
    return poutine.trace(poutine.condition(model, values)).get_trace(Y, idx).log_prob_sum()


def conditional(view, X, u):
    """Means and variances of f given u, by dense matrices."""
    Z, k = view.inducing_points, view.kernel
    Luu = torch.linalg.cholesky(k(Z) + 1e-8 * k.variance * torch.eye(len(Z)))
    A = torch.linalg.inv(Luu) @ k(Z, X)
    return (u @ A).mT, k(X).diagonal()[:, None] - A.square().sum(0)[:, None]


def dense_log_joint(model, Y, values):
    total = sum(dist.Normal(0.0, 1.0).log_prob(value).sum() for value in values.values())
    for name, columns in model.columns.items():
        y, likelihood = Y[:, columns], model.likelihood_of(name)
        mean, variance = conditional(model.views[name], values["X"], values[f"u_{name}"])
        seen = ~torch.isnan(y)
        value = torch.nan_to_num(y)
        if isinstance(likelihood, LowRankGaussian):
            total = total + dense_rows(y, mean, variance, dense_covariance(likelihood)).sum()
            continue
        if isinstance(likelihood, Gaussian):
            expected = dist.Normal(mean, likelihood.variance.sqrt()).log_prob(value) - variance / (2.0 * likelihood.variance)
        else:  # quadrature of the expected log density of a binary entry
            nodes, weights = gauss_hermite_rule(200)
            f = mean[..., None] + variance.sqrt()[..., None] * nodes
            expected = (dist.Bernoulli(logits=f).log_prob(value[..., None]) * weights).sum(-1)
        total = total + expected[seen].sum()
    return total


def dense_covariance(likelihood):
    return likelihood.cov_factor @ likelihood.cov_factor.mT + likelihood.cov_diag.diag()


def dense_rows(y, mean, variance, covariance):
    """Expected log densities of rows with correlated residuals, by the inverse of the covariance of their observed entries."""
    rows = []
    for n, seen in enumerate(~torch.isnan(y)):
        noise = covariance[seen][:, seen]
        log_prob = dist.MultivariateNormal(mean[n, seen], noise).log_prob(y[n, seen]) if seen.any() else torch.zeros(())
        rows.append(log_prob - 0.5 * (torch.linalg.inv(noise).diagonal() * variance[n, 0]).sum())
    return torch.stack(rows)


def gauss_hermite_rule(num_points):
    nodes, weights = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(num_points))
    return nodes, weights / weights.sum()


@pytest.mark.parametrize("make", [small_model, gaussian_model, low_rank_model])
def test_log_joint_is_the_sum_of_the_dense_formulas_of_the_views(make):
    model, Y = make(), small_table(binary=make is not gaussian_model)
    values = {name: value.requires_grad_() for name, value in sites().items()}
    fast, slow = log_joint(model, Y, values), dense_log_joint(model, Y, values)
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-6)
    variables = [*values.values(), *model.parameters()]
    for a, b in zip(*(torch.autograd.grad(value, variables) for value in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [None, RowArguments(prior_loc=torch.randn(N, Q).double(), prior_scale=0.3)])
@pytest.mark.parametrize("make", [small_model, gaussian_model, low_rank_model])
def test_pure_log_joint_and_score_are_those_of_the_trace(make, rows):
    model, Y = make(rows=rows), small_table(binary=make is not gaussian_model)
    values = sites()
    with poutine.trace() as tr, poutine.condition(data=values):
        statistics = model.statistics(Y)
    assert set(tr.trace.nodes) >= {"u_sensors", "u_label"}
    X = values["X"].requires_grad_()
    log_prob = model.log_joint({"X": X}, statistics).sum()
    log_u = sum(dist.Normal(0.0, 1.0).log_prob(value).sum() for name, value in values.items() if name != "X")
    torch.testing.assert_close(log_prob + log_u, log_joint(model, Y, values))
    (gradient,) = torch.autograd.grad(log_prob, X, retain_graph=True)
    torch.testing.assert_close(model.score({"X": X}, statistics)["X"], gradient)


@pytest.mark.parametrize("likelihood_term", ["svgp", "fitc"])
@pytest.mark.parametrize("rows", [None, RowArguments(standard_error=torch.rand(N, 5).double())])
def test_bound_of_one_view_is_that_of_the_model_without_views(likelihood_term, rows):
    Y = small_table(binary=False)
    Y[2, 0], options = 0.3, {"num_inducing": 5, "likelihood_term": likelihood_term, "rows": rows}
    one = BayesianGPLVM(N, 5, Q, likelihood=Gaussian(data_dim=5), **options).initialize(Y)
    several = MultiViewGPLVM(N, {"all": 5}, Q, **options)
    several.views["all"].inducing_points = one.inducing_points.detach()
    several.likelihood_of("all").variance = one.likelihood.variance.detach()
    several.mean = one.mean
    several.initial_values = {"X": one.initial_values["X"], "u_all": one.initial_values["u"]}
    bounds = []
    for model in (one, several):
        guide = MeanFieldGuide(model)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            bounds.append(TraceMeanField_ELBO().loss(model, guide, Y))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-13)


@pytest.mark.parametrize("columns", [1, 5])
def test_standard_errors_are_those_of_the_columns_of_a_view(columns):
    error, Y, values = 0.5 + torch.rand(N, columns), small_table(binary=False), sites()
    model = gaussian_model(rows=RowArguments(standard_error=error))
    with poutine.condition(data=values):
        entries = model.log_joint({"X": values["X"]}, model.statistics(Y))
    want = dist.Normal(0.0, 1.0).log_prob(values["X"]).sum(-1)
    for name, part in model.columns.items():
        mean, variance = conditional(model.views[name], values["X"], values[f"u_{name}"])
        noise = model.likelihood_of(name).variance + (error if columns == 1 else error[:, part]).square()
        expected = dist.Normal(mean, noise.sqrt()).log_prob(Y[:, part].nan_to_num()) - variance / (2.0 * noise)
        want = want + torch.where(Y[:, part].isnan(), 0.0, expected).sum(-1)
    torch.testing.assert_close(entries, want, rtol=1e-6, atol=1e-6)


def test_a_view_that_is_missing_contributes_nothing():
    model, Y = gaussian_model(), small_table(binary=False)
    Y[:] = torch.nan
    Y[:, :3] = 0.1  # the label is missing for all rows
    values = sites()
    X = values["X"].requires_grad_()
    both = log_joint(model, Y, values)
    alone = BayesianGPLVM(N, 3, Q, RBF(Q, lengthscale=1.3), num_inducing=5, likelihood=Gaussian(0.3))
    alone.inducing_points = model.views["sensors"].inducing_points.detach()
    u_label = dist.Normal(0.0, 1.0).log_prob(values["u_label"]).sum()
    one = log_joint(alone, Y[:, :3], {"X": X, "u": values["u_sensors"]})
    torch.testing.assert_close(both, one + u_label)
    torch.testing.assert_close(*(torch.autograd.grad(value, X)[0] for value in (both, one)))
    parameters = [*model.views["label"].parameters(), *model.likelihood_of("label").parameters()]
    for gradient in torch.autograd.grad(log_joint(model, Y, values), parameters):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_linear_functions_of_known_latents_have_the_evidence_of_the_dense_gaussian():
    """With M = N inducing points at known latents the optimal bound is the log marginal likelihood."""
    X, noise = torch.randn(N, Q), {"a": 0.3, "b": 0.7}
    rows = RowArguments(prior_loc=X, prior_scale=1e-10)
    kernels = {"a": Linear(Q, variance=0.8), "b": Matern(Q, nu=1.5)}
    likelihood = {name: Gaussian(value) for name, value in noise.items()}
    model = MultiViewGPLVM(N, {"a": 2, "b": 1}, Q, kernels, num_inducing=N, likelihood=likelihood, rows=rows)
    Y = torch.randn(N, 3)
    Y[:3, 2] = torch.nan  # rows without view b
    guide = MeanFieldGuide(model, init_scale=1e-10)
    guide(Y)
    expected = 0.0
    with torch.no_grad():
        for name, columns in model.columns.items():
            view, y = model.views[name], Y[:, columns]
            view.inducing_points = X
            Luu = torch.linalg.cholesky(view.kernel(X) + 1e-8 * torch.eye(N))
            seen = ~torch.isnan(y[:, 0])
            A = torch.linalg.solve_triangular(Luu, view.kernel(X, X[seen]), upper=False)
            covariance = torch.linalg.inv(torch.eye(N) + A @ A.mT / noise[name])
            scale = torch.linalg.cholesky(covariance).expand(y.shape[1], N, N)
            setattr(guide.locs, f"u_{name}", (covariance @ A @ y[seen] / noise[name]).mT)
            setattr(guide.scales, f"u_{name}", scale)
            K = view.kernel(X[seen])
            dense = dist.MultivariateNormal(torch.zeros(len(K)), K + noise[name] * torch.eye(len(K)))
            expected += dense.log_prob(y[seen].mT).sum()
        guide.locs.X = X
        bound = -MeanFieldELBO().loss(model, guide, Y)  # with u marginalised
    assert bound == pytest.approx(float(expected), abs=1e-4)


def test_mini_batches_are_unbiased():
    model, Y, values = small_model(), small_table(), sites()
    log_u = sum(dist.Normal(0.0, 1.0).log_prob(value).sum() for name, value in values.items() if name != "X")
    parts = [log_joint(model, Y[i], values | {"X": values["X"][i]}, i) - log_u for i in torch.randperm(N).split(7)]
    torch.testing.assert_close(sum(parts) / len(parts), log_joint(model, Y, values) - log_u)


@pytest.mark.parametrize("make_guide", [MeanFieldGuide, lambda model: AutoAnnealedLangevin(model, num_steps=1)])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_fits_in_mini_batches_and_by_svi(make_guide):
    Y = small_table()
    model = small_model().initialize(Y)
    guide = make_guide(model)
    losses = fit(model, guide, Y, num_steps=20, batch_size=7, progress=False).losses
    assert sum(losses[-5:]) < sum(losses[:5])
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    assert torch.tensor([svi.step(Y), svi.step(Y[:5], torch.arange(5))]).isfinite().all()
