"""Hostile configurations: a part of the benchmark, and the kinds of failures that it found."""

from collections import Counter
from itertools import islice

import pytest
import torch

from benchmarks.tasks import robustness
from benchmarks.tasks.robustness import configurations, is_clear, try_configuration
from pyro_lvgp._utils.cholesky import safe_cholesky
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import fit
from pyro_lvgp.kernels import Linear, Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM, LinearGPVAE, RandomFeatureLVM

SUBSET = list(islice(configurations(7), 40))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("start", range(0, 40, 10))
def test_hostile_configurations_are_fine_or_clear_errors(start):
    for configuration in SUBSET[start : start + 10]:
        outcome, text = try_configuration(configuration)
        assert outcome in ("fine", "clear errors"), f"{text} ({configuration})"


def test_the_subset_has_every_model_and_most_kinds():
    assert {configuration.model for configuration in SUBSET} == set(robustness.GUIDES)
    assert {configuration.dtype for configuration in SUBSET} == {"float32", "float64"}
    assert len({configuration.kind for configuration in SUBSET}) > 12
    assert list(islice(configurations(7), 40)) == SUBSET


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (ValueError("expected a positive number, got 0; pass 1"), True),
        (TypeError("expected a tensor, got None; use torch.tensor"), True),
        (RuntimeError("expected a positive number, got 0"), False),
        (ValueError("Expected parameter loc (Tensor of shape ()) to satisfy the constraint Real()"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_clear_errors(error, clear):
    assert is_clear(error) is clear


def test_run_counts_every_configuration(monkeypatch):
    outcomes = iter(["fine", "clear errors", "failures"] * 20)
    monkeypatch.setattr(robustness, "try_configuration", lambda configuration: (next(outcomes), "text"))
    rows = list(robustness.run(quick=True, seeds=1))
    counts = {row.metric: row.value for row in rows if row.dataset == "all"}
    assert counts == {"configurations": 40, "fine": 14, "clear errors": 13, "failures": 13}
    by_group = Counter(row.dataset for row in rows if row.metric == "configurations")
    assert by_group["by model"] == len(robustness.GUIDES)
    assert sum(row.dataset == "failures" for row in rows) == 13


def test_a_covariance_of_zeros_has_a_factor(dtype):
    L = safe_cholesky(torch.stack([torch.zeros(2, 2, dtype=dtype), torch.eye(2, dtype=dtype)]))
    assert (L[0].diagonal() > 0.0).all()
    torch.testing.assert_close(L[1], torch.eye(2, dtype=dtype), rtol=1e-4, atol=1e-6)


def test_a_linear_kernel_of_one_row(dtype):
    Y = torch.tensor([[1.0, 2.0]], dtype=dtype)
    model = BayesianGPLVM(1, 2, 2, Linear(2), num_inducing=1).to(dtype).initialize(Y)
    guide = MeanFieldGuide(model)
    fit(model, guide, Y, num_steps=2, progress=False)
    assert model.reconstruct(guide, Y).mean.isfinite().all()


def test_latents_of_precise_rows_by_laplace():
    Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    model = BayesianGPLVM(12, 3, 2, Linear(2), num_inducing=2, likelihood=Gaussian(1e-9)).initialize(Y)
    with torch.no_grad():
        model.likelihood.variance_unconstrained.fill_(-20.0)
    guide = MeanFieldGuide(model)
    guide(Y)
    rows = Y[:, :1] * torch.tensor([1.0, 1.0 + 1e-4, 1.0])  # one direction, so that the other has no information
    posterior = model.infer_latents(guide, rows, method="laplace", num_steps=3)
    assert posterior.mean.isfinite().all()
    assert posterior.scale_tril.isfinite().all()


def test_processes_far_from_standardised_are_refused():
    x, Y = 1e8 * torch.linspace(0.0, 1.0, 12)[:, None].double(), torch.randn(12, 3).double()
    model = LinearGPVAE(Linear(1, batch_shape=(2,)), independent_dim=1)
    with pytest.raises(ValueError, match=r"prior variances of at most 1e\+08 .*got 1\.0e\+16; standardise the inputs"):
        model.fit(x, Y, num_sweeps=2)


def test_weights_of_features_without_rank():
    Y = 1e6 * torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    model = RandomFeatureLVM(12, 3, 2, num_frequencies=4, num_components=2, likelihood=Gaussian(1e-12, data_dim=3))
    guide = RandomFeatureGuide(model, weights="explicit")
    weights = guide(Y)["a"]  # their precisions are 1 + 1e12 times a singular matrix
    assert weights.isfinite().all()


def test_a_precision_of_weights_that_rounding_makes_indefinite(monkeypatch):
    Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    model = RandomFeatureLVM(12, 3, 2, num_frequencies=4, num_components=2)
    guide = RandomFeatureGuide(model, weights="explicit")
    guide(Y)
    precision = guide.a.precision.detach()
    found = guide.a.distribution().precision_matrix
    torch.testing.assert_close(found, precision.expand_as(found), rtol=1e-3, atol=1e-3)
    singular = torch.full_like(precision, 1e8) + torch.eye(8)
    assert (torch.linalg.cholesky_ex(singular.flip(-2, -1)).info > 0).any()
    monkeypatch.setattr(type(guide.a), "precision", singular, raising=False)
    assert guide()["a"].isfinite().all()


def test_a_linear_gp_vae_of_one_point():
    model = LinearGPVAE(Matern(1, 1.5, batch_shape=(1,)), independent_dim=1)
    bounds = model.fit(torch.zeros(1, 1).double(), torch.ones(1, 3).double(), num_sweeps=3)
    assert torch.tensor(bounds).isfinite().all()
    assert model.predict(num_samples=2).mean.isfinite().all()


def test_infinite_entries_of_a_linear_gp_vae_are_named():
    x, Y = torch.linspace(0.0, 1.0, 12)[:, None].double(), torch.randn(12, 3).double()
    Y[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"expected finite entries or NaN for missing ones, got inf at y\[1, 2\]"):
        LinearGPVAE(None, independent_dim=1).fit(x, Y, num_sweeps=2)
