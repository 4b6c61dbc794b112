"""Benchmark of any model: the same densities in Pyro and NumPyro, moments of NUTS against closed forms, rows of a run."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites

pytest.importorskip("numpyro")

import pyroapi

from benchmarks.core.report import aggregate, to_markdown
from benchmarks.peers.numpyro_nuts import log_joint, nuts
from benchmarks.tasks import any_model
from benchmarks.tasks.any_model.contest import Budget, Estimate, Outcome, contend, moments
from benchmarks.tasks.any_model.posterior import Distance, Moments
from benchmarks.tasks.any_model.problem import Problem
from benchmarks.tasks.any_model.table import ANNEALED, BASE, Comparison, comparison_rows, is_close, summary_rows, words
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer.sampling import sample_traces

TINY = Budget(num_steps=3, num_evaluations=4, num_draws=20, num_chains=2, num_transitions=20)
SHARED = [name for name, make in any_model.TASKS.items() if "gplvm" not in name]

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("name", SHARED)
def test_models_have_one_density_in_pyro_and_numpyro(name):
    problem = any_model.TASKS[name]()
    trace = prune_subsample_sites(poutine.trace(problem.model).get_trace(*problem.tensors))
    latents = {name: site["value"].numpy() for name, site in trace.iter_stochastic_nodes()}
    assert latents
    expected = log_joint(problem.model, problem.data, latents)
    assert trace.log_prob_sum().item() == pytest.approx(expected, rel=1e-10, abs=1e-6)


def test_only_the_model_of_the_library_has_no_reference():
    assert [name for name, make in any_model.TASKS.items() if not make().runs_in_numpyro] == ["gplvm", "large_gplvm"]
    assert len(any_model.TASKS) >= 16


@pytest.mark.parametrize("name", any_model.TASKS)
def test_models_broadcast_over_draws_as_they_say(name):
    problem = any_model.TASKS[name]()
    guide = MeanFieldGuide(problem.model)
    guide(*problem.tensors)

    def draw(vectorize):
        return sample_traces(problem.model, guide, *problem.tensors, num_samples=3, vectorize=vectorize, seed=0)

    if not problem.vectorize:
        with pytest.raises(RuntimeError):
            draw(True)
    traces = draw(problem.vectorize)
    for s in range(3):
        values = {name: site.value[s] for name, site in traces.sites.items() if site.kind == "latent"}
        trace = poutine.trace(poutine.condition(problem.model, values)).get_trace(*problem.tensors)
        torch.testing.assert_close(traces.log_p[s], trace.log_prob_sum().detach())


def _conjugate():
    """Normal mean and Poisson rate with conjugate priors; posterior moments of the mean and of the logarithm of the rate."""

    def model(y, counts):
        mean = pyroapi.pyro.sample("mean", pyroapi.distributions.Normal(1.0, 2.0))
        rate = pyroapi.pyro.sample("rate", pyroapi.distributions.Gamma(3.0, 1.0))
        with pyroapi.pyro.plate("data", len(y)):
            pyroapi.pyro.sample("y", pyroapi.distributions.Normal(mean, 1.5), obs=y)
            pyroapi.pyro.sample("counts", pyroapi.distributions.Poisson(rate), obs=counts)

    y, counts = np.array([0.3, 2.0, -1.0, 0.5]), np.array([1.0, 0.0, 2.0, 1.0])
    precision, shape = torch.tensor(1 / 2.0**2 + 4 / 1.5**2), torch.tensor(3.0 + counts.sum())
    mean = torch.stack([(1.0 / 2.0**2 + y.sum() / 1.5**2) / precision, shape.digamma() - math.log(1.0 + 4)])
    variance = torch.stack([1.0 / precision, torch.special.polygamma(1, shape)])
    return Problem(model, (y, counts)), mean.numpy(), variance.sqrt().numpy()


def _moments(mean, stddev, error=0.01):
    return Moments(mean, np.log(stddev), np.full_like(mean, error), np.full_like(mean, error / 2**0.5), 1.0)


def test_moments_of_nuts_are_those_of_a_closed_form():
    problem, mean, stddev = _conjugate()
    draws = nuts(problem.model, problem.data, num_warmup=300, num_samples=500, num_chains=2, seed=0)
    assert draws["mean"].shape == (2, 500)
    assert draws["mean"].dtype == np.float64
    result = moments(problem, {name: torch.as_tensor(value) for name, value in draws.items()})
    assert result.rhat < 1.02
    assert (abs(result.mean - mean) < 4 * stddev * result.mean_error).all()
    assert (abs(result.log_stddev - np.log(stddev)) < 4 * result.log_stddev_error).all()
    assert result.mean_error.max() < 0.1  # the tolerances mean something
    assert result.log_stddev_error.max() < 0.1


def test_errors_of_moments_of_independent_normal_draws():
    draws = np.random.default_rng(0).standard_normal((2, 2000, 50))
    result = Moments.of(3.0 + 0.1 * draws)
    np.testing.assert_allclose(result.mean_error, 4000**-0.5, rtol=0.2)
    np.testing.assert_allclose(result.log_stddev_error, 8000**-0.5, rtol=0.2)
    # The errors of 50 coordinates have a root mean square of one standard error.
    exact = _moments(np.full(50, 3.0), np.full(50, 0.1), error=0.0)
    distance = Distance.between(result, exact)
    assert distance.means == pytest.approx(distance.means_error, rel=0.4)
    assert distance.log_stddevs == pytest.approx(distance.log_stddevs_error, rel=0.4)


def test_distances_are_in_units_of_the_reference():
    reference = _moments(np.array([1.0, 2.0]), np.array([0.1, 10.0]), error=0.03)
    other = _moments(np.array([1.3, -2.0]), np.array([0.2, 10.0]), error=0.04)
    distance = Distance.between(other, reference)
    assert distance.means == pytest.approx(math.sqrt((3.0**2 + 0.4**2) / 2))
    assert distance.log_stddevs == pytest.approx(math.log(2.0) / math.sqrt(2))
    assert distance.means_error == pytest.approx(math.sqrt((0.08**2 + 0.03**2 + 0.04**2 + 0.03**2) / 2))
    assert distance.log_stddevs_error == pytest.approx(0.05 / math.sqrt(2))


def test_a_contest_measures_bounds_and_distances():
    problem, mean, stddev = _conjugate()
    budget = Budget(num_steps=500, num_evaluations=100, num_draws=1000, num_chains=2, num_transitions=20)
    outcome = contend(lambda: problem, MeanFieldGuide, budget, reference=_moments(mean, stddev), seed=0)
    assert outcome.failure is None
    assert outcome.bound.mean > outcome.first.mean + 1.0
    # The evidences of the conjugate pairs; a Gaussian of the log rate comes within a tenth of a nat.
    y, counts = problem.tensors
    normal = dist.MultivariateNormal(torch.ones(4), 2.0**2 * torch.ones(4, 4) + 1.5**2 * torch.eye(4)).log_prob(y)
    shape = 3.0 + counts.sum()
    poisson = shape.lgamma() - math.lgamma(3.0) - shape * math.log(5.0) - (counts + 1.0).lgamma().sum()
    assert abs(outcome.bound.mean - (normal + poisson)) < 0.1 + 4 * outcome.bound.error
    assert outcome.bound.error < 0.05
    assert outcome.distance.means < 0.3
    assert outcome.distance.log_stddevs < 0.3
    assert torch.get_default_dtype() == torch.float64


def test_an_error_ends_a_contest_and_is_a_row_with_its_words():
    def broken(model):
        guide = MeanFieldGuide(model)

        def call(*args):
            if torch.is_grad_enabled():
                raise ValueError("expected\n  a | chain")
            return guide(*args)

        return call

    problem, _, _ = _conjugate()
    failed = contend(lambda: problem, broken, TINY, reference=None, seed=0)
    assert failed.first is not None
    assert failed.bound is None
    fine = contend(lambda: problem, MeanFieldGuide, TINY, reference=None, seed=0)
    assert (fine.failure, fine.distance) == (None, None)
    comparison = Comparison(fine, failed)
    assert math.isnan(comparison.gain)
    table = to_markdown(aggregate([*comparison_rows("toy", comparison, {}), *summary_rows([comparison], 0, {})]))
    assert "| AutoAnnealedLangevin: ValueError: expected a / chain" in table
    assert words(ValueError("x" * 1000)).endswith("x …")
    summary = {row.metric: row.mean for row in aggregate(summary_rows([comparison], 0, {}))}
    assert (summary["failures"], summary["bound ≥ base − 1 se"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("gain", "at_least", "better"),
    [(-6.0, 0.0, 0.0), (-4.0, 1.0, 0.0), (4.0, 1.0, 0.0), (6.0, 1.0, 1.0), (math.nan, 0.0, 0.0)],
)
def test_a_summary_counts_models(gain, at_least, better):
    base = Outcome(Estimate(-9.0, 0.3), Estimate(-3.0, 3.0), Distance(0.4, 0.4, 0.05, 0.05))
    annealed = Outcome(Estimate(-9.4, 0.4), Estimate(-3.0 + gain, 4.0), Distance(0.19, 0.21, 0.05, 0.05))
    comparison = Comparison(base, annealed)
    assert comparison.gain_in_errors == pytest.approx(gain / 5.0, nan_ok=True)
    counts = {row.metric: row.mean for row in aggregate(summary_rows([comparison] * 2, 2, {}))}
    assert counts["bound ≥ base − 1 se"] == 2 * at_least
    assert counts["bound > base + 1 se"] == 2 * better
    assert counts["first bound ≥ base − 1 se"] == 2.0
    assert (counts["means close to NUTS"], counts["sds close to NUTS"], counts["failures"]) == (2.0, 0.0, 0.0)


def test_a_distance_is_close_if_half_of_the_base_or_within_errors():
    assert is_close(0.5, 1.0, 0.0)
    assert not is_close(0.51, 1.0, 0.0)
    assert is_close(0.51, 1.0, 0.26)
    assert not is_close(0.51, None, 0.25)
    assert not is_close(math.nan, 1.0, 1.0)


@pytest.mark.parametrize("name", ["eight_schools", "gplvm"])
def test_a_run_ends_with_all_rows(monkeypatch, name):
    monkeypatch.setattr(any_model, "QUICK", TINY)
    monkeypatch.setattr(any_model, "MAX_RHAT", math.inf)
    rows = aggregate(any_model.run(quick=True, seeds=1, only=name))
    values = {(row.method, row.metric): row.mean for row in rows}
    for method in (BASE, ANNEALED):
        assert {"first bound [nats]", "bound [nats]", "its standard error"} <= {m for of, m in values if of == method}
        assert ((method, "means, distance [sd]") in values) == (name != "gplvm")
    assert np.isfinite([value for (method, _), value in values.items() if method in (BASE, ANNEALED)]).all()
    assert any("NUTS" in method for method, _ in values) == (name != "gplvm")
    assert rows[-1].dataset == f"summary of 1 models, {int(name != 'gplvm')} of them with a reference"
    assert values[ANNEALED + ", models", "failures"] == 0.0
