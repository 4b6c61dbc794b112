"""Bounds of guides against quadrature, and the benchmark at a few steps."""

import math
from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch

from benchmarks.tasks import sandwich
from benchmarks.tasks.annealed import LEARNED_REVERSE, METHODS, Method, Task
from pyro_lvgp.infer import _compiled_loop
from pyro_lvgp.models import BayesianGPLVM

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Few rows, and no compilation: it takes minutes, and wrappers that check shapes cannot be compiled."""
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph)
    monkeypatch.setattr(sandwich, "BATCH_SIZE", 4)
    monkeypatch.setattr(sandwich, "NUM_ROWS", 30)
    with torch.compiler.set_stance("force_eager"):
        yield


def model_of(num_rows: int, latent_dim: int) -> BayesianGPLVM:
    """A model of three columns that simulates its density."""
    sizes = num_rows, 3, latent_dim
    return BayesianGPLVM(*sizes, num_inducing=4, likelihood_term="fitc").requires_grad_(False)


def test_bounds_agree_with_quadrature(monkeypatch):
    model, u, Y = model_of(4, 1), torch.randn(3, 4), torch.randn(4, 3)
    guide, _ = sandwich.fitted_guide(model, Method(), Y, u, num_steps=2, seed=0)
    X = torch.linspace(-8.0, 8.0, 2001)[:, None]
    log_width = math.log(16.0 / 2000)
    with torch.no_grad():
        log_p = torch.stack([model.predictive(guide, X).log_prob(y).sum(-1) for y in Y], -1) + dist.Normal(0.0, 1.0).log_prob(
            X
        )
        log_q = dist.Normal(guide.locs.X[:, 0], guide.scales.X[:, 0]).log_prob(X)
    log_w, q = log_p - log_q, (log_q + log_width).exp()
    mean = (q * log_w).sum(0)
    variance = (q * (log_w - mean).square()).sum(0)
    monkeypatch.setattr(sandwich, "NUM_REPEATS", 4000)
    standard_error = (variance.mean() / (4 * 4000)).sqrt()
    assert abs(sandwich.bound(model, guide, Y, u, 1) - mean.mean()) < 4 * standard_error
    evidence = (log_p + log_width).logsumexp(0).mean()
    assert mean.mean() + 4 * standard_error < sandwich.bound(model, guide, Y, u, 50) < evidence + 4 * standard_error


def test_inducing_values_stay_as_they_are():
    model, u, Y = model_of(6, 2), torch.randn(3, 4), torch.randn(6, 3)
    for method in (Method(num_steps=2), Method(num_samples=2, weighted=True)):
        guide, _ = sandwich.fitted_guide(model, method, Y, u, num_steps=2, seed=0)
        torch.testing.assert_close(guide.median(Y)["u"], u, rtol=0.0, atol=1e-4)
        assert not torch.equal(guide.median(Y)["X"], torch.zeros(6, 2))


def test_quick_run(monkeypatch):
    monkeypatch.setattr(sandwich, "NUM_CHAINS", 3)
    monkeypatch.setattr(sandwich, "NUM_REPEATS", 2)
    short = {name: replace(method, num_steps=min(method.num_steps, 2)) for name, method in METHODS.items()}
    monkeypatch.setattr(sandwich, "METHODS", short)
    table = Task(torch.randn(40, 3), latent_dim=2, checkpoints=(3,))
    monkeypatch.setattr(sandwich, "table", lambda name: table)
    measured = list(sandwich.run(quick=True, seeds=1))
    assert {each.dataset for each in measured} == {"simulated, constant rates", "simulated, falling rates"}
    found = {(each.method, each.metric): each.value for each in sandwich.run(quick=True, seeds=1, only="falling")}
    assert {(*key, value) for key, value in found.items()} <= {(each.method, each.metric, each.value) for each in measured}
    assert found[sandwich.PLAIN, "gap closed"] == 0.0
    for name in LEARNED_REVERSE:
        assert found[name, "gap closed"] <= 1.0
    gap = {found[name, "evidence, upper [nats/row]"] - found[name, "bound [nats/row]"] for name in LEARNED_REVERSE[:2]}
    assert min(gap) > 0.0
