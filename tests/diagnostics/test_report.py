"""Reports of constructed fits whose defects are known."""

import importlib
import math
from html.parser import HTMLParser

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_lvgp.diagnostics import NotApplicable, report
from pyro_lvgp.diagnostics._hidden_entries import _interval, entries_to_hide
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.guides.annealed.transitions import UnderdampedLangevin
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit
from pyro_lvgp.kernels import Linear
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM

pytestmark = pytest.mark.usefixtures("float64")
N, D = 80, 6


def linear_data(num_factors=1, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    X, W, e = (torch.randn(*shape, generator=generator) for shape in ((N, num_factors), (num_factors, D), (N, D)))
    return X @ W + noise * e


def linear_model(Y, latent_dim=1, **options):
    return BayesianGPLVM(N, D, latent_dim, Linear(latent_dim), num_inducing=latent_dim + 1, **options).initialize(Y)


def fitted(model, Y, num_steps=1500):
    guide = MeanFieldGuide(model)
    how = "torchscript" if num_steps > 200 else False
    options = {"num_steps": num_steps, "optim": JointAdam(lr=0.02), "compile": how, "progress": False}
    return guide, fit(model, guide, Y, loss=MeanFieldELBO("data"), **options)


def texts(result):
    return [finding.text for finding in result.findings]


@pytest.fixture
def few_draws(monkeypatch):
    """The fewest draws for leave-one-out densities, in tests of other checks."""
    monkeypatch.setattr(importlib.import_module("pyro_lvgp.diagnostics.report"), "_NUM_LOO_DRAWS", 25)


@pytest.fixture(scope="module")
def good():
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    Y = linear_data()
    model = linear_model(Y)
    guide, history = fitted(model, Y)
    return model, guide, Y, history


def test_a_converged_linear_gaussian_model_has_no_findings(good):
    model, guide, Y, history = good
    state = torch.get_rng_state()
    result = report(model, guide, Y, history=history)
    assert torch.equal(torch.get_rng_state(), state)
    assert texts(result) == []
    assert result.convergence.converged
    assert result.weights.pareto_k.shape == (N,)
    assert result.weights.effective_sample_size.min() > 200
    assert result.leave_one_out.pareto_k.shape == (N,)
    assert [each.level for each in result.coverage.intervals] == [0.5, 0.9]
    assert result.latents.ratios["X"].item() < 0.1
    assert isinstance(result.chains, NotApplicable)
    assert isinstance(result.evidence, NotApplicable)
    assert str(result).startswith("no findings in 5 of 7 checks\n")
    assert "chains: not applicable: the guide has no chains" in str(result)


@pytest.mark.usefixtures("few_draws")
def test_an_undertrained_fit_has_not_converged():
    Y = linear_data()
    model = BayesianGPLVM(N, D, 2, num_inducing=10)
    guide = MeanFieldGuide(model)
    options = {"loss": MeanFieldELBO("data"), "compile": "torchscript", "progress": False}
    history = fit(model, guide, Y, num_steps=600, optim=JointAdam(lr=1e-4), **options)
    result = report(model, guide, Y, history=history)
    assert result.convergence.converged is False
    assert result.findings[0].severity == "warning"
    assert "had not converged" in result.findings[0].text


@pytest.mark.usefixtures("few_draws")
def test_without_a_history_or_with_a_short_one_nothing_is_said_of_convergence(good):
    model, guide, Y, _ = good
    assert report(model, guide, Y).convergence == NotApplicable("no history was given; pass history=fit(...)")
    guide, history = fitted(linear_model(Y), Y, num_steps=10)
    found = report(model, guide, Y, history=history).convergence.findings
    assert [(finding.severity, finding.text[:8]) for finding in found] == [("note", "10 steps")]


def local_model(y):
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def guide_of_scales(factor):
    """Exact posterior N(y / 2, 1/2) of the local model, with factors on the standard deviations."""

    def guide(y):
        with pyro.plate("data", len(y)):
            pyro.sample("x", dist.Normal(y / 2.0, factor * math.sqrt(0.5)))

    return guide


def test_a_guide_of_too_small_scale_has_high_k_at_its_rows():
    y, factor = torch.linspace(-2.0, 2.0, 20), torch.ones(20)
    factor[[3, 11]] = 0.25
    result = report(local_model, guide_of_scales(factor), y, local_plate="data", num_samples=1000)
    (finding,) = result.findings
    assert sorted(finding.rows) == [3, 11]
    assert finding.severity == "warning"
    assert "k̂ is above 0.7 for 2 of 20 data" in finding.text
    assert str(finding.rows[0]) in str(result)
    assert result.leave_one_out.reason.startswith("expected latent sites outside plate 'data'")
    exact = report(local_model, guide_of_scales(1.0), y, local_plate="data")
    assert exact.findings == ()
    torch.testing.assert_close(exact.weights.effective_sample_size, torch.full((20,), 400.0))
    torch.testing.assert_close(exact.latents.ratios["x"], torch.tensor([0.5]), rtol=0.05, atol=0.0)


def test_weights_of_a_model_without_a_plate_are_joint():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(loc, 1.0).expand([3]).to_event(1), obs=y)  # does not broadcast over draws

    def guide(y):
        pyro.sample("loc", dist.Normal(y.sum() / 4.0, 0.05))

    result = report(model, guide, torch.zeros(3), num_samples=200, vectorize=False)
    assert texts(result)[0].startswith("k̂ of the joint weights is")
    assert result.findings[0].rows == ()
    for check in (result.latents, result.leave_one_out, result.coverage):
        assert isinstance(check, NotApplicable)


@pytest.mark.usefixtures("few_draws")
def test_useless_latent_dimensions_are_named():
    Y = linear_data()
    model = BayesianGPLVM(N, D, 3, num_inducing=20).initialize(Y)
    model.kernel.lengthscale = torch.tensor([1e3, 1.0, 1e3])
    model.kernel.requires_grad_(False)
    guide, _ = fitted(model, Y, num_steps=500)
    result = report(model, guide, Y)
    assert result.latents.unused == {"X": [0, 2]}
    torch.testing.assert_close(result.latents.relevances, torch.tensor([1e-3, 1.0, 1e-3]))
    (text,) = (text for text in texts(result) if "unused" in text)
    assert "2 of 3 dimensions of site 'X' are unused: the posterior of dimensions 0, 2 is the prior" in text


@pytest.mark.usefixtures("few_draws")
def test_the_prior_variance_of_latents_is_that_given_the_globals():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            x = pyro.sample("x", dist.Normal(torch.stack([loc, 0.0 * loc], -1), 2.0).to_event(1))
            pyro.sample("y", dist.Normal(x[..., 0], 1.0), obs=y)

    def guide(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 0.1))
        with pyro.plate("data", len(y)):
            pyro.sample("x", dist.Normal(torch.stack([loc, 0.0 * loc], -1), torch.tensor([1.0, 2.0])).to_event(1))

    result = report(model, guide, torch.zeros(500), local_plate="data", vectorize=False, num_samples=100)
    torch.testing.assert_close(result.latents.ratios["x"], torch.tensor([1.01 / 4.01, 1.0]), rtol=0.03, atol=0.0)
    assert result.latents.unused == {"x": [1]}


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("anew", [False, True], ids=["latents of rows", "new guide"])
def test_too_little_noise_is_found_by_coverage(anew):
    Y = linear_data()
    model = linear_model(Y, likelihood=Gaussian(0.05**2))
    model.likelihood.requires_grad_(False)
    guide, _ = fitted(model, Y, num_steps=500)
    noise = model.likelihood.variance.item()

    def make_guide(model, Y):
        return fitted(model, Y, num_steps=500)[0]

    result = report(model, guide, Y, make_guide=make_guide if anew else None)
    fifty, ninety = result.coverage.intervals
    assert fifty.coverage < 0.3
    assert ninety.coverage < 0.6
    assert result.coverage.fitted_anew is anew
    assert sum("intervals of hidden entries are too narrow" in text for text in texts(result)) == 2
    assert model.likelihood.variance.item() == noise


def test_standard_errors_of_coverage_count_rows_whose_entries_are_dependent():
    """Of rows that are covered wholly or not at all, the variance of a mean over rows; else at least that of entries."""
    hidden, rows = torch.ones(100, 4, dtype=torch.bool), torch.arange(100) < 60
    dependent = _interval(0.5, rows[:, None].expand(100, 4), hidden, 0.5)
    assert dependent.coverage == 0.6
    assert dependent.standard_error == pytest.approx((0.6 * 0.4 / 99) ** 0.5, rel=1e-6)
    even = _interval(0.5, (torch.arange(4) < 2).expand(100, 4), hidden, 0.5)
    assert even.standard_error == pytest.approx((0.25 / 400) ** 0.5, rel=1e-6)
    assert _interval(0.9, hidden, hidden, 1.0).standard_error > 0.0


def test_hidden_entries_leave_one_in_each_row_and_column():
    y = torch.randn(30, 4)
    y[:, 0] = torch.nan
    y[5, 0] = 1.0
    y[7, 1:] = torch.nan
    y[7, 2] = 0.0
    hidden = entries_to_hide(y, 0.9, 0)
    assert not hidden[y.isnan()].any()
    visible = ~(hidden | y.isnan())
    assert visible.any(0).all()
    assert visible.any(1).all()
    share = entries_to_hide(torch.zeros(400, 50), 0.1, 0).double().mean()
    assert abs(share - 0.1) < 4 * (0.09 / 20_000) ** 0.5


NARROW = torch.tensor([1.0, 1.0, 0.01, 1.0, 0.02])


class Annealable(pyro.nn.PyroModule):
    """Rows of which some are too narrow for a step size."""

    def __init__(self, scales):
        super().__init__()
        self.scales = nn.Parameter(scales)

    def forward(self, y):
        with pyro.plate("data", 5):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(x, self.scales), obs=y)


def annealed(model, y, step_size=0.4, **options):
    base = MeanFieldGuide(model, init_scale=0.7)
    guide = AutoAnnealedLangevin(model, local_plate="data", base_guide=base, num_steps=4, step_size=step_size, **options)
    guide(y)
    return guide


def test_harmful_chains_are_named_worst_first():
    model = Annealable(NARROW)
    guide = annealed(model, torch.zeros(5), dynamics=UnderdampedLangevin(math.inf), base_weight=0.0)
    result = report(model, guide, torch.zeros(5))
    found = [finding for finding in result.findings if finding.text.startswith("chains lower")]
    assert [finding.rows for finding in found] == [(2, 4)]
    assert result.evidence.reason == "simulated data need a guide of their own; pass make_guide"


def test_evidence_of_simulated_data_is_bounded_from_both_sides():
    model = Annealable(torch.ones(5))

    def make_guide(model, y):
        guide = annealed(model, y, step_size=0.1)
        fit(model, guide, y, num_steps=300, progress=False)
        return guide

    y = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])
    result = report(model, make_guide(model, y), y, make_guide=make_guide)
    sandwich = result.evidence.sandwich
    assert sandwich.gap.abs().mean() < 0.1
    scales = torch.sqrt(1.0 + model.scales.detach().square())
    assert (sandwich.lower < dist.Normal(0.0, scales).log_prob(torch.tensor(0.0)) + 0.1).all()
    assert result.evidence.findings == ()
    untrained = report(
        model, annealed(model, y), y, make_guide=lambda model, y: annealed(model, 100.0 + 0.0 * y, step_size=1e-6)
    )
    assert untrained.evidence.sandwich.gap.mean() > sandwich.gap.mean()


@pytest.mark.usefixtures("few_draws")
def test_html_has_the_same_findings_escaped(good):
    model, guide, Y, _ = good
    result = report(model, guide, Y)
    cells = []

    class Cells(HTMLParser):
        def handle_data(self, data):
            cells.append(data)

    Cells().feed(result._repr_html_())
    for check in result.checks.values():
        assert check.summary in cells


def test_errors_of_the_data_are_not_hidden(good):
    model, guide, Y, _ = good
    with pytest.raises(ValueError, match="expected y of shape"):
        report(model, guide, Y[:, :2])
    with pytest.raises(ValueError, match="hidden_share between 0 and 1"):
        report(model, guide, Y, hidden_share=10.0)
    with pytest.raises(ValueError, match="25 or more"):
        report(model, guide, Y, num_samples=3)
