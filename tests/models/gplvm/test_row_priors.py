"""Priors of the latents of each row."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian, Poisson
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from tests.models.gplvm._models import D, M, N, Q, with_holes

pytestmark = pytest.mark.usefixtures("float64")


def make_rows(num_rows=N):
    return RowArguments(prior_loc=torch.randn(num_rows, Q), prior_scale=0.1 + torch.rand(num_rows, Q))


def make(rows, Y=None, **kwargs):
    model = BayesianGPLVM(N, D, Q, num_inducing=M, rows=rows, **kwargs)
    return model if Y is None else model.initialize(Y)


def test_the_prior_of_each_row_is_that_of_its_latents():
    rows = make_rows()
    X, idx = torch.randn(N, Q), torch.tensor([4, 1])
    trace = poutine.trace(poutine.condition(make(rows), {"X": X})).get_trace(torch.randn(N, D))
    expected = dist.Normal(rows.prior_loc, rows.prior_scale).log_prob(X).sum(-1)
    torch.testing.assert_close(trace.nodes["X"]["fn"].log_prob(X), expected)
    trace = poutine.trace(poutine.condition(make(rows), {"X": X[idx]})).get_trace(torch.randn(2, D), idx)
    torch.testing.assert_close(trace.nodes["X"]["fn"].log_prob(X[idx]), expected[idx])


@pytest.mark.parametrize("likelihood", [Gaussian(0.2), Poisson()])
@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9])])
def test_log_joint_and_score_are_those_of_the_sites(likelihood, idx):
    Y = torch.poisson(torch.ones(N, D))
    Y = with_holes(Y) if idx is None else Y[idx]
    model = make(make_rows(), likelihood=likelihood)
    X, u = torch.randn(len(Y), Q, requires_grad=True), torch.randn(D, M)
    statistics = poutine.condition(model.statistics, {"u": u})(Y, idx)
    trace = poutine.trace(poutine.condition(model, {"X": X, "u": u})).get_trace(Y, idx)
    expected = sum(trace.nodes[name]["fn"].log_prob(trace.nodes[name]["value"]) for name in ("X", "y"))
    torch.testing.assert_close(model.log_joint({"X": X}, statistics), expected)
    (gradient,) = torch.autograd.grad(expected.sum(), X)
    torch.testing.assert_close(model.score({"X": X}, statistics)["X"], gradient)
    assert (statistics.score is None) == isinstance(likelihood, Poisson)


class Traced(BayesianGPLVM):
    """Model whose chains trace it."""

    def forward(self, y=None, idx=None, rows=None):
        return super().forward(y, idx, rows)


@pytest.mark.parametrize("idx", [None, torch.tensor([5, 0, 9, 2])])
@pytest.mark.parametrize("dynamics", ["underdamped", "overdamped"])
def test_chains_in_closed_form_are_those_of_the_traced_model(idx, dynamics):
    """The same draws, bounds and gradients by the score in closed form in whitened coordinates, and by traces of the model."""
    Y, rows, results = torch.randn(N, D), make_rows(), []
    for cls in (BayesianGPLVM, Traced):
        with seeded(0):
            model = cls(N, D, Q, num_inducing=M, rows=rows).initialize(Y)
            guide = AutoAnnealedLangevin(model, num_steps=3, step_size=0.1, dynamics=dynamics)
            guide(Y)
            args = (Y,) if idx is None else (Y[idx], idx)
            loss = MeanFieldELBO(max_plate_nesting=1, num_samples=1)(model, guide)(*args)
            loss.backward()
            gradients = {name: p.grad for name, p in guide.named_parameters() if p.grad is not None}
            results.append({"loss": loss.detach(), "X": guide(*args)["X"].detach(), **gradients})
    assert len(results[0]) > 6
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_rows_of_nothing_but_noise_have_their_priors(method):
    model = make(make_rows(), likelihood=Gaussian(1e9))
    guide = MeanFieldGuide(model)
    guide(torch.randn(N, D))
    new = make_rows(4)
    options = {"num_steps": 300, "learning_rate": 0.05} if method == "variational" else {}
    q = model.infer_latents(guide, torch.randn(4, D), rows=new, method=method, **options)
    atol = 1e-6 if method == "laplace" else 0.15
    torch.testing.assert_close(q.mean, new.prior_loc, rtol=0.0, atol=atol)
    torch.testing.assert_close(q.stddev, new.prior_scale, rtol=0.0, atol=atol)


@pytest.mark.parametrize("num_starts", [1, 3])
def test_latents_of_new_rows_are_those_of_factor_analysis_with_their_priors(num_starts):
    """Given u, a linear kernel makes x | y Gaussian: precision diag(s⁻²) + WᵀW/σ²."""
    model = make(make_rows(), kernel=Linear(Q), likelihood=Gaussian(0.5))
    guide = MeanFieldGuide(model, init_scale=1e-6)
    guide(torch.randn(N, D))
    guide.locs.u = torch.randn(D, M)
    with torch.no_grad():
        W = model.predict(guide, torch.eye(Q)).f_mean.mT
    new, Y = make_rows(3), torch.randn(3, D)
    q = model.infer_latents(guide, Y, rows=new, num_starts=num_starts)
    for n in range(3):
        precision = torch.diag(new.prior_scale[n] ** -2) + W.mT @ W / 0.5
        loc = torch.linalg.solve(precision, W.mT @ Y[n] / 0.5 + new.prior_loc[n] / new.prior_scale[n] ** 2)
        torch.testing.assert_close(q.mean[n], loc, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(q.variance[n], torch.linalg.inv(precision).diagonal(), rtol=1e-3, atol=1e-5)


def test_initial_latents_are_near_their_prior_means_where_priors_are_narrow():
    time = torch.linspace(-2.0, 2.0, N)
    scale = torch.tensor([0.05, 1.0]).expand(N, Q)
    other = torch.randn(N)
    Y = torch.stack([time, other, time + other], -1) + 0.01 * torch.randn(N, D)
    rows = RowArguments(prior_loc=torch.stack([time, torch.zeros(N)], -1), prior_scale=scale)
    model = make(rows, Y)
    X = model.initial_values["X"]
    assert (X[:, 0] - time).abs().max() < 0.3
    assert abs(torch.corrcoef(torch.stack([X[:, 1], other - other.mean()]))[0, 1]) > 0.9
    given = torch.randn(N, Q)
    assert torch.equal(model.initialize(Y, latents=given).initial_values["X"], given)


def test_a_model_that_is_not_initialised_has_prior_means_as_initial_latents():
    rows = make_rows()
    guide = MeanFieldGuide(make(rows))
    guide(torch.randn(N, D))
    torch.testing.assert_close(guide.locs.X.detach(), rows.prior_loc)


def test_one_prior_is_refused_beside_those_of_rows():
    model = make(make_rows(), torch.randn(N, D))
    guide = MeanFieldGuide(model)
    guide(torch.randn(N, D))
    with pytest.raises(ValueError, match="expected one prior of the latents"):
        model.infer_latents(guide, torch.randn(2, D), rows=make_rows(2), prior=dist.Normal(torch.zeros(Q), 1.0).to_event(1))
    q = model.infer_latents(guide, torch.randn(2, D))  # the mixture fitted to the training latents
    assert q.mean.shape == (2, Q)
