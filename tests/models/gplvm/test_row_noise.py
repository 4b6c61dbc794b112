"""Exposures of rows of counts, and known standard errors of entries."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import MarginalizeGaussians, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Gaussian, Heterogeneous, LogNormal, LowRankGaussian, NegativeBinomial, Poisson, StudentT
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from tests.models.gplvm._models import D, M, N, Q, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def make(rows, likelihood, **kwargs):
    return BayesianGPLVM(N, D, Q, num_inducing=M, rows=rows, likelihood=likelihood, **kwargs)


def trace_of(model, Y, idx=None, **kwargs):
    values = {
        "X": torch.linspace(-1.0, 1.0, len(Y) * Q).reshape(len(Y), Q),
        "u": torch.linspace(-1.0, 1.0, D * M).reshape(D, M),
    }
    return poutine.trace(poutine.condition(model, values)).get_trace(Y, idx, **kwargs)


def function_of(model, Y, idx=None):
    """Moments of f without what is known of rows."""
    fn = trace_of(model, Y, idx, rows=RowArguments()).nodes["y"]["fn"]
    entries = (fn.rows if not hasattr(fn, "base_dist") else fn).base_dist
    return entries.base_dist.f_mean, entries.base_dist.f_variance


@pytest.mark.parametrize("by_entry", [False, True])
@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9])])
@pytest.mark.parametrize("term", ["svgp", "fitc"])
def test_the_likelihood_of_counts_has_rates_in_proportion_to_exposures(by_entry, idx, term):
    """Against the likelihood at moments of f + log e."""
    exposure = 0.2 + 5.0 * torch.rand((N, D) if by_entry else (N,))
    Y = with_holes(torch.poisson(torch.ones(N, D)))
    Y = Y if idx is None else Y[idx]
    model = make(RowArguments(exposure=exposure), Poisson(), likelihood_term=term)
    trace = trace_of(model, Y, idx)
    mean, variance = function_of(model, Y, idx)
    e = exposure if by_entry else exposure[:, None]
    f = mean + (e if idx is None else e[idx]).log()
    value, observed = Y.nan_to_num(), ~Y.isnan()
    if term == "svgp":  # E[y f − exp(f)] − log y!
        entries = value * f - (f + 0.5 * variance).exp() - torch.lgamma(value + 1.0)
    else:
        grid = torch.linspace(-9.0, 9.0, 4001)[:, None, None]
        log_p = dist.Poisson((f + variance.sqrt() * grid).exp()).log_prob(value) + dist.Normal(0.0, 1.0).log_prob(grid)
        entries = torch.trapezoid(log_p.exp(), grid, dim=0).log()
    expected = torch.where(observed, entries, 0.0).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"]), expected, rtol=1e-5, atol=1e-6)


def heteroscedastic_rows(by_entry):
    return RowArguments(standard_error=2.0 * torch.rand((N, D) if by_entry else (N,)))


@pytest.mark.parametrize("by_entry", [False, True])
@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9]), torch.tensor([3])])
@pytest.mark.parametrize("term", ["svgp", "fitc"])
@pytest.mark.parametrize("data_dim", [None, D])
def test_the_noise_variance_of_an_entry_is_the_sum_of_both(by_entry, idx, term, data_dim):
    rows, Y = heteroscedastic_rows(by_entry), with_holes(torch.randn(N, D))
    Y = Y if idx is None else Y[idx]
    likelihood = Gaussian(0.3 if data_dim is None else torch.rand(D) + 0.1, data_dim=data_dim)
    model = make(rows, likelihood, likelihood_term=term)
    trace = trace_of(model, Y, idx)
    log_prob = trace.nodes["y"]["fn"].log_prob(trace.nodes["y"]["value"])
    f_mean, f_variance = function_of(model, Y, idx)
    error = rows.standard_error if idx is None else rows.standard_error[idx]
    variance = likelihood.params() + error.square()
    if term == "svgp":
        entries = dist.Normal(f_mean, variance.sqrt()).log_prob(Y.nan_to_num()) - 0.5 * f_variance / variance
    else:
        entries = dist.Normal(f_mean, (variance + f_variance).sqrt()).log_prob(Y.nan_to_num())
    torch.testing.assert_close(log_prob, torch.where(Y.isnan(), 0.0, entries).sum(-1))


def test_expectations_over_inducing_outputs_are_exact():
    """The bound that marginalises u, against the mean of many draws of u."""
    Y, rows = with_holes(torch.randn(N, D)), heteroscedastic_rows(True)
    model = make(rows, Gaussian(0.2))
    guide = MeanFieldGuide(model, init_scale=0.5)
    guide(Y)
    X = torch.randn(N, Q)
    q = dist.MultivariateNormal(guide.locs.u.detach(), scale_tril=guide.scales.u.detach())
    trace = poutine.trace(poutine.condition(guide, {"X": X})).get_trace(Y)

    conditioned = poutine.condition(MarginalizeGaussians(trace)(model), {"X": X, "u": q.mean})
    exact = poutine.trace(conditioned).get_trace(Y).nodes["y"]["fn"].log_prob(Y.nan_to_num())
    many = poutine.condition(model, {"X": X.expand(3000, N, Q), "u": q.sample((3000,))})
    with pyro.plate("draws", 3000, dim=-2):
        y = poutine.trace(many).get_trace(Y).nodes["y"]
    draws = y["fn"].log_prob(y["value"]).detach()
    assert draws.shape == (3000, N)
    assert ((draws.mean(0) - exact).abs() < 4.5 * draws.std(0) / 3000**0.5).all()


@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9, 2])])
@pytest.mark.parametrize("kind", ["errors", "exposures"])
def test_chains_of_the_pure_log_joint_are_those_of_the_traced_model(idx, kind):
    class Traced(BayesianGPLVM):
        def forward(self, y=None, idx=None, rows=None):
            return super().forward(y, idx, rows)

    Y = with_holes(torch.randn(N, D) if kind == "errors" else torch.poisson(torch.ones(N, D)))
    rows = heteroscedastic_rows(True) if kind == "errors" else RowArguments(exposure=0.2 + torch.rand(N))
    results = []
    for cls in (BayesianGPLVM, Traced):
        with seeded(0):
            likelihood = Gaussian() if kind == "errors" else NegativeBinomial()
            model = cls(N, D, Q, num_inducing=M, rows=rows, likelihood=likelihood).initialize(Y)
            guide = AutoAnnealedLangevin(model, num_steps=3, step_size=0.1)
            args = (Y,) if idx is None else (Y[idx], idx)
            guide(Y)
            loss = MeanFieldELBO(max_plate_nesting=1, num_samples=1)(model, guide)(*args)
            loss.backward()
            gradients = {name: p.grad for name, p in guide.named_parameters() if p.grad is not None}
            results.append({"loss": loss.detach(), **gradients})
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def test_predictions_have_the_exposures_and_errors_of_the_predicted_rows():
    X = torch.randn(4, Q)
    model = make(RowArguments(exposure=0.5 + torch.rand(N)), Poisson())
    guide = MeanFieldGuide(model, init_scale=1e-6)
    guide(torch.ones(N, D))
    one, ten = (model.predict(guide, X, rows=RowArguments(exposure=torch.tensor([e])), num_samples=2) for e in (1.0, 10.0))
    torch.testing.assert_close(ten.mean, 10.0 * one.mean, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(ten.f_mean, one.f_mean + math.log(10.0), rtol=1e-4, atol=1e-4)
    each = model.predictive(guide, X, rows=RowArguments(exposure=torch.tensor([1.0, 10.0, 1.0, 10.0])))
    torch.testing.assert_close(each.mean[1], ten.mean[1], rtol=1e-3, atol=0.0)

    model = make(heteroscedastic_rows(True), Gaussian(0.2))
    guide = MeanFieldGuide(model, init_scale=1e-6)
    Y = torch.randn(N, D)
    guide(Y)
    none, some = (
        model.predict(guide, X, rows=RowArguments(standard_error=torch.tensor([e])), num_samples=2) for e in (0.0, 2.0)
    )
    torch.testing.assert_close(some.variance, none.variance + 4.0)
    own = model.reconstruct(guide, Y, num_samples=2)
    without = model.reconstruct(guide, Y, rows=RowArguments(standard_error=torch.zeros(1)), num_samples=2)
    torch.testing.assert_close(own.variance - without.variance, model.rows.standard_error.square(), rtol=1e-3, atol=1e-4)
    holes = with_holes(Y)
    filled = model.impute(guide, holes, num_samples=2)
    torch.testing.assert_close(filled.variance, torch.where(holes.isnan(), own.variance, 0.0), rtol=1e-2, atol=1e-3)


def test_latents_of_new_rows_account_for_exposures():
    """Rows of the same rates have the same latents, whatever their exposures; the wrong exposures move them."""
    torch.manual_seed(0)
    x, e = torch.linspace(-2.0, 2.0, N), torch.linspace(50.0, 500.0, N)
    rates = torch.stack([x, -x, 0.5 * x], -1).exp()
    Y, rows = torch.poisson(e[:, None] * rates), RowArguments(exposure=e)
    model = BayesianGPLVM.from_data(Y, 1, num_inducing=10, likelihood=Poisson(), rows=rows)
    guide = MeanFieldGuide(model)
    fit(model, guide, Y, num_steps=400, progress=False, compile="torchscript")
    new = torch.round(rates[[2, 2, 8]] * torch.tensor([[100.0], [1000.0], [100.0]]))
    prior = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    exposure = torch.tensor([100.0, 1000.0, 100.0])
    mixture = model.infer_latents(guide, new, rows=RowArguments(exposure=exposure))  # screens components row by row
    for method in ("laplace", "variational"):
        q = model.infer_latents(guide, new, rows=RowArguments(exposure=exposure), method=method, prior=prior)
        assert abs(q.mean[0] - q.mean[1]) < 0.1
        assert abs(q.mean[0] - q.mean[2]) > 0.5
        torch.testing.assert_close(mixture.mean, q.mean, rtol=0.0, atol=0.15)


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(), LogNormal()])
def test_initial_functions_are_those_of_rates(likelihood):
    torch.manual_seed(0)
    e = torch.linspace(20.0, 2000.0, N)
    rates = torch.randn(N, Q) @ torch.randn(Q, D)
    Y = torch.poisson(e[:, None] * rates.exp()) + (isinstance(likelihood, LogNormal) and 1.0)
    model = make(RowArguments(exposure=e), likelihood).initialize(Y)
    X = model.initial_values["X"]
    assert abs(torch.corrcoef(torch.cat([X.mT, e.log()[None]]))[-1, :-1]).max() < 0.8
    offset = likelihood.params().detach().log() if isinstance(likelihood, NegativeBinomial) else 0.0
    torch.testing.assert_close(model.mean + offset, rates.mean(0), rtol=0.0, atol=0.3)


def test_what_a_likelihood_cannot_account_for_is_refused():
    exposure, error = RowArguments(exposure=torch.ones(N)), RowArguments(standard_error=torch.ones(N))
    for likelihood in (Gaussian(), StudentT()):
        with pytest.raises(TypeError, match="expected a likelihood with a log link for exposures"):
            make(exposure, likelihood)
    for likelihood in (Poisson(), StudentT(), Heterogeneous([(Gaussian(), [0]), (Poisson(), [1, 2])])):
        with pytest.raises(TypeError, match="expected a likelihood with Gaussian noise for standard errors"):
            make(error, likelihood)
    with pytest.raises(NotImplementedError, match="Gaussian noise for known variances, got Poisson"):
        Poisson().add_variance(torch.ones(()), torch.ones(N, D))


def test_exposures_of_columns_of_several_kinds_need_a_log_link_of_each():
    exposure = RowArguments(exposure=0.5 + torch.rand(N))
    counts = Heterogeneous([(Poisson(), [0]), (NegativeBinomial(3.0), [1, 2])])
    with pytest.raises(TypeError, match="expected a likelihood with a log link for exposures"):
        make(exposure, Heterogeneous([(Poisson(), [0]), (Gaussian(), [1, 2])]))
    Y = torch.poisson(torch.ones(N, D))
    model = make(exposure, counts)
    mean, variance = function_of(model, Y)
    f = mean + exposure.exposure.log()
    expected = counts.log_prob_of_rows(Y, torch.ones_like(Y, dtype=torch.bool), f, variance, counts.params())
    torch.testing.assert_close(trace_of(model, Y).nodes["y"]["fn"].log_prob(Y), expected)


def test_default_likelihood_of_data_with_standard_errors():
    model = BayesianGPLVM.from_data(torch.randn(N, D), 1, rows=RowArguments(standard_error=torch.ones(N)))
    assert type(model.likelihood) is LowRankGaussian
    assert model.likelihood.rank == D // 3
