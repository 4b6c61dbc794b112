"""The estimators of the annealed benchmarks against closed forms and quadrature, and the benchmarks at a few steps."""

import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

pytest.importorskip("gpytorch")
pytest.importorskip("numpyro")

from benchmarks.core import scores
from benchmarks.core.report import aggregate
from benchmarks.tasks import annealed, annealed_peers, annealed_pictures
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO, _compiled_loop
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.plots import PALETTE

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """Compilation takes minutes, and what the tests wrap around functions to check shapes cannot be compiled."""
    monkeypatch.setattr(_compiled_loop, "compile_graph", lambda graph, *_, **__: graph)
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def fitted():
    """A model of one latent dimension and a guide whose u is far from certain."""
    Y = torch.randn(12, 3)
    model = BayesianGPLVM(12, 3, 1, num_inducing=5).initialize(Y)
    guide = MeanFieldGuide(model, init_scale=0.4)
    guide(Y)
    return model, guide, Y


def _marginal_moments(model, guide, X):
    """Mean and variance of y at X, from the formulas: A m, s + diag(A S A) + σ²."""
    with torch.no_grad():
        Z = model.inducing_points
        Luu = torch.linalg.cholesky(model.kernel(Z) + 1e-8 * torch.eye(5))
        A = torch.linalg.solve(Luu, model.kernel(Z, X))
        L = guide.scales.u
        spread = torch.einsum("mx,dmk,djk,jx->xd", A, L, L, A)
        given_u = model.kernel.diagonal(X) - A.square().sum(0)
        return model.mean + A.mT @ guide.locs.u.mT, given_u[:, None] + spread + model.likelihood.variance


def test_predictive_integrates_u_out(fitted):
    model, guide, _ = fitted
    X = torch.linspace(-2.0, 2.0, 20)[:, None]
    entries = model.predictive(guide, X)
    for got, want in zip((entries.mean, entries.variance), _marginal_moments(model, guide, X), strict=True):
        assert torch.allclose(got, want, atol=1e-6)


def test_held_out_log_likelihood_is_that_of_quadrature(fitted):
    model, guide, _ = fitted
    Y = torch.randn(4, 3)
    Y[2, 0] = torch.nan
    X = torch.linspace(-7.0, 7.0, 2001)[:, None]
    mean, variance = _marginal_moments(model, guide, X)
    entries = dist.Normal(mean, variance.sqrt()).log_prob(torch.nan_to_num(Y)[:, None])
    rows = torch.where(torch.isnan(Y)[:, None], 0.0, entries).sum(-1) + dist.Normal(0.0, 1.0).log_prob(X).sum(-1)
    want = (rows.logsumexp(-1) + (X[1] - X[0]).log()).mean().item()
    assert scores.held_out_log_likelihood(model, guide, Y, draws=4000) == pytest.approx(want, abs=0.02)


def test_expected_log_likelihood_and_bound_differ_by_the_divergences(fitted):
    model, guide, Y = fitted
    with torch.no_grad():
        X = guide.locs.X, guide.scales.X
        kl = 0.5 * (X[0].square() + X[1].square() - 2.0 * X[1].log() - 1.0).sum()
        u, L = guide.locs.u, guide.scales.u
        kl += 0.5 * (u.square().sum() + L.square().sum() - u.numel()) - L.diagonal(dim1=-2, dim2=-1).log().sum()
    bound = -scores.negative_bound(MeanFieldELBO(num_samples=800, max_plate_nesting=1), model, guide, Y, draws=1)
    expected = scores.expected_log_likelihood(model, guide, Y, draws=1000)
    assert bound + kl.item() / 12 == pytest.approx(expected, abs=0.1)


def test_reconstruction_tells_seen_from_hidden(fitted):
    model, guide, Y = fitted
    hidden = torch.zeros(12, 3, dtype=torch.bool)
    hidden[0, 0] = True
    truth = Y.clone()
    truth[0, 0] += 1000.0
    mse, hidden_rmse = scores.reconstruction(model, guide, Y, truth, hidden)
    assert mse < 2.0
    assert hidden_rmse == pytest.approx(1000.0, rel=0.01)
    assert math.isnan(scores.reconstruction(model, guide, Y, Y, torch.zeros_like(hidden))[1])


def _not_recorded(model, *, compile, **options):
    return AutoAnnealedLangevin(model, **options)


MEASURED = [name for name in annealed.METHODS if name not in annealed.RESAMPLING]
MEASURED += ["annealed, K = 4, a momentum of each step × IW, S = 4", "annealed, K = 4, learned reverse × SMC, S = 4"]
RECORDED = ("annealed, K = 10, defaults", "annealed, K = 10, learned reverse")  # recording takes longer than these few steps


@pytest.mark.parametrize("method", MEASURED)
def test_methods_are_measured_on_images_with_hidden_pixels(method, monkeypatch):
    monkeypatch.setattr(annealed, "BATCH_SIZE", 20)
    monkeypatch.setattr(annealed, "NUM_INDUCING", 5)
    if method not in RECORDED:
        monkeypatch.setattr(annealed, "AutoAnnealedLangevin", _not_recorded)
    for score in (scores.negative_bound, scores.expected_log_likelihood):
        monkeypatch.setattr(annealed, score.__name__, partial(score, draws=2))
    task = replace(annealed.images(torch.rand(120, 9), 2), draws=20)
    assert task.hidden.any()
    rows = aggregate(annealed.measure("toy", task, method, seed=0, checkpoints=(2, 4)))
    values = {(row.dataset, row.metric): row.mean for row in rows}
    assert len(values) == 4 + 5  # what is held out is looked at after the last step only
    assert np.isfinite(list(values.values())).all()


def test_hidden_rows_are_not_those_held_out():
    task = annealed.images(torch.rand(2000, 4), 2)
    for seed in range(3):
        held_out = torch.rand(2000, generator=torch.Generator().manual_seed(seed)) < 0.1
        assert 0.5 < (task.hidden.any(1) & ~held_out).sum() / task.hidden.any(1).sum() < 1.0


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data sets")
def test_tasks_have_the_shapes_of_the_papers():
    shapes = {name: tuple(make().Y.shape) for name, make in annealed.TASKS.items()}
    for name in ("oilflow", "wine_red"):
        assert shapes.pop(f"{name}_defaults") == shapes[name]
    for name in ("oilflow", "wine_red", "frey", "mnist_1_7"):
        assert shapes.pop(f"{name}_reverse") == shapes[name]
    assert shapes.pop("oilflow_converged") == shapes.pop("oilflow_resampling") == shapes["oilflow"]
    assert shapes == {"oilflow": (1000, 12), "wine_red": (1599, 11), "frey": (1965, 560), "mnist_1_7": (2163, 784)}
    for make in annealed.TASKS.values():
        assert abs(make().Y.mean()) < 1e-3
        assert make().Y.var() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with oilflow.npz")
def test_peers_are_measured(monkeypatch):
    Y = annealed_peers.standardised()[:60]
    monkeypatch.setattr(annealed_peers, "standardised", lambda: Y)
    monkeypatch.setattr(annealed_peers, "NUM_INDUCING", 10)
    monkeypatch.setattr(annealed_peers, "BATCH_SIZE", 20)
    rows = aggregate(annealed_peers.measure(num_steps=4, seed=0, lengths=(2,), block=2, compile=False))
    values = {(row.method, row.metric): row.mean for row in rows}
    assert len({method for method, _ in values}) == 4
    assert np.isfinite(list(values.values())).all()
    bounds = [value for (_, metric), value in values.items() if metric.startswith("negative bound")]
    assert max(bounds) < 1.5 * min(bounds)  # four bounds on one evidence from one start


@pytest.mark.skipif("PYRO_LVGP_DATA" not in os.environ, reason="PYRO_LVGP_DATA names no folder with the data sets")
def test_pictures_are_drawn(tmp_path, capsys, monkeypatch):
    faces = annealed.frey()
    few = replace(faces, Y=faces.Y[:400], hidden=faces.hidden[:400])
    monkeypatch.setitem(annealed_pictures.TASKS, "frey", lambda: few)
    monkeypatch.setattr(annealed, "AutoAnnealedLangevin", _not_recorded)
    annealed_pictures.main(["--quick", "--out", str(tmp_path / "new")])
    assert capsys.readouterr().out.startswith("    python -m benchmarks.tasks.annealed_pictures --quick --out")
    expected = {  # a curve for each of four fits, three flow regimes, and what hides pixels
        "annealed_learning_curves.png": PALETTE[:4],
        "annealed_oilflow_latents.png": PALETTE[:3],
        "annealed_frey_faces.png": ("#C9D6E8",),
    }
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(expected)
    for name, colours in expected.items():
        assert (tmp_path / "new" / name).stat().st_size < 300_000
        image = plt.imread(tmp_path / "new" / name)[..., :3]
        for colour in colours:
            assert (abs(image - to_rgb(colour)) < 1e-3).all(-1).sum() > 20
