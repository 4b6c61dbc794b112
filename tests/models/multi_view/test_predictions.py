"""Predictions of views, relevances, initial values, files and refused combinations."""

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

from pyro_lvgp import load, save
from pyro_lvgp.diagnostics import to_arviz
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.kernels import RBF, Linear
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, LowRankGaussian, Poisson, StudentT
from pyro_lvgp.models import MultiViewGPLVM, RowArguments
from pyro_lvgp.models.initialization import jointly_diagonalizing_rotation
from tests.models.multi_view._data import DIMS, N, Q, shared_and_private, small_model, small_table, smooth


def fitted(views, latent_dim, num_steps, **options):
    model = MultiViewGPLVM.from_data(views, latent_dim, num_inducing=20, **options)
    guide = MeanFieldGuide(model)
    optim, callbacks = JointAdam(lr=0.05), [LRSchedule("cosine")]
    options = {"loss": MeanFieldELBO(max_plate_nesting=1), "optim": optim, "callbacks": callbacks, "progress": False}
    fit(model, guide, model.table(views), num_steps=num_steps, compile="torchscript", **options)
    return model, guide


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_shared_and_private_dimensions_are_recovered_and_a_hidden_view_is_predicted():
    torch.manual_seed(1)
    Z, views = shared_and_private(260)
    train = {name: table[:200].clone() for name, table in views.items()}
    train["b"][:30] = torch.nan  # rows without view b
    model, guide = fitted(train, 3, 400)
    assert sorted(model.dimensions().values()) == [("a",), ("a", "b"), ("b",)]
    position = {names: q for q, names in model.dimensions().items()}
    X = guide.locs.X.detach()[30:]
    for names, z in {("a", "b"): 0, ("a",): 1, ("b",): 2}.items():
        # A correlation of 0.31 of 170 independent rows is four standard errors.
        assert abs(torch.corrcoef(torch.stack([X[:, position[names]], Z[30:200, z]]))[0, 1]) > 0.31
    # The view depends on the shared and on a private latent, of which the other view tells the first alone.
    new, truth = views["a"][200:], views["b"][200:]
    predicted = model.predict_view(guide, "b", {"a": new}, num_samples=32, seed=0)
    explained = 1.0 - (predicted.mean - truth).square().mean() / truth.var(0).mean()
    assert 0.15 < explained < 0.8
    lower, upper = predicted.quantile([0.05, 0.95])
    covered = ((truth >= lower) & (truth <= upper)).double().mean(1)
    assert abs(covered.mean() - 0.9) < 4.0 * covered.std() / len(covered) ** 0.5 + 0.03  # columns of a row are dependent


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_intervals_of_a_target_cover_it():
    torch.manual_seed(0)
    x = torch.randn(300, 2)
    views = {"inputs": smooth(x, 8) + 0.2 * torch.randn(300, 8), "target": smooth(x, 1) + 0.3 * torch.randn(300, 1)}
    model, guide = fitted({name: table[:200] for name, table in views.items()}, 2, 250)
    truth = views["target"][200:]
    predicted = model.predict_view(guide, "target", {"inputs": views["inputs"][200:]}, num_samples=32, seed=0)
    lower, upper = predicted.quantile([0.05, 0.95])
    coverage = ((truth >= lower) & (truth <= upper)).double().mean()
    assert abs(coverage - 0.9) < 4.0 * (0.09 / len(truth)) ** 0.5
    assert (predicted.mean - truth).square().mean() < 0.5 * truth.var()  # of which noise is about 0.2


def test_prediction_of_a_view_is_its_part_of_the_prediction_of_all():
    model, Y = small_model(), small_table()
    model.initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    X = torch.randn(4, Q)
    both, label = model.predict(guide, X, seed=1), model.predict_view(guide, "label", X, seed=1)
    torch.testing.assert_close(label.mean, both.mean[:, model.columns["label"]])
    torch.testing.assert_close(label.log_prob(torch.ones(4, 2)), both.log_prob(torch.ones(4, 5))[:, 3:])
    given = {"sensors": torch.randn(4, 3)}
    prior = dist.Normal(torch.zeros(Q), 1.0).to_event(1)
    latents = model.infer_latents(guide, model.table(given), prior=prior, num_starts=5, seed=1)
    torch.testing.assert_close(
        model.predict_view(guide, "label", given, num_samples=4, seed=1).mean,
        model.predict_view(guide, "label", latents, num_samples=4, seed=1).mean,
    )


def test_relevance_of_an_rbf_is_the_closed_form_and_that_of_a_linear_kernel_its_share_of_variance():
    lengthscale, variance = torch.tensor([0.8, 2.0, 9.0]), torch.tensor([3.0, 1.0, 0.0001])
    kernel = {"a": RBF(3, lengthscale=lengthscale), "b": Linear(3, variance=variance)}
    model = MultiViewGPLVM(20, {"a": 1, "b": 1}, 3, kernel, num_inducing=5)
    s = (1.0 + 2.0 / lengthscale.square()).rsqrt()
    # Means over 4096 pairs: the relative standard error of each expectation is at most 0.025.
    torch.testing.assert_close(model.relevance("a"), (1.0 - s) / (1.0 - s.prod()), rtol=0.06, atol=0.002)
    torch.testing.assert_close(model.relevance("b"), variance / variance.sum(), rtol=0.12, atol=0.002)
    assert model.dimensions() == {0: ("a", "b"), 1: ("a", "b"), 2: ()}
    assert model.dimensions(0.5) == {0: ("a", "b"), 1: (), 2: ()}


def test_rotation_diagonalizes_matrices_with_common_eigenvectors(float64):
    basis, _ = torch.linalg.qr(torch.randn(4, 4))
    A = basis @ torch.diag_embed(torch.rand(3, 4)) @ basis.mT
    R = jointly_diagonalizing_rotation(A)
    torch.testing.assert_close(R.mT @ R, torch.eye(4))
    rotated = R.mT @ A @ R
    torch.testing.assert_close(rotated, torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_files_are_bit_for_bit(tmp_path, dtype):
    model, Y = small_model().to(dtype), small_table().to(dtype)
    model.initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    model.views["label"].kernel.lengthscale = torch.tensor([0.5, 3.0], dtype=dtype)
    save(tmp_path / "views.safetensors", model, guide)
    again, its_guide = load(tmp_path / "views.safetensors")
    given = {"sensors": Y[4:8, :3]}
    one, other = (
        m.predict_view(g, "label", given, num_samples=5, seed=0).mean for m, g in ((model, guide), (again, its_guide))
    )
    assert torch.equal(one, other)
    assert torch.equal(model.relevance("label"), again.relevance("label"))


def test_tables_of_all_kinds():
    frame = pd.DataFrame({"p": [1.0, None, 3.0], "q": [1, 2, 3]}, index=list("xyz"))
    views = {"frame": frame, "series": pd.Series([True, False, True], index=list("xyz")), "array": np.arange(6).reshape(3, 2)}
    model = MultiViewGPLVM.from_data(views, 1, likelihood={"series": Bernoulli()}, num_inducing=2)
    assert model.columns == {"frame": slice(0, 2), "series": slice(2, 3), "array": slice(3, 5)}
    expected = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0], [torch.nan, 2.0, 0.0, 2.0, 3.0], [3.0, 3.0, 1.0, 4.0, 5.0]])
    torch.testing.assert_close(model.table(views), expected, equal_nan=True)
    assert model.table({"series": [1.0]}).isnan().tolist() == [[True, True, False, True, True]]
    assert MultiViewGPLVM.from_data({"a": torch.randn(9, 2).double()}, 1).mean.dtype == torch.float64


def test_default_number_of_latents_with_likelihoods_that_have_parameters():
    x = torch.randn(40, 2)
    views = {"a": x @ torch.randn(2, 6) + 0.1 * torch.randn(40, 6), "b": x @ torch.randn(2, 4) + 0.1 * torch.randn(40, 4)}
    likelihood = {"a": StudentT(data_dim=6), "b": Gaussian(0.1)}
    model = MultiViewGPLVM.from_data(views, likelihood=likelihood)
    assert model.latent_dim == 2
    assert model.likelihood_of("a") is likelihood["a"]
    history = fit(model, MeanFieldGuide(model), model.table(views), num_steps=2, progress=False)
    assert np.isfinite(history.losses).all()


def test_priors_on_parameters_of_views_and_arviz():
    model, Y = small_model(), small_table()
    model.views["label"].kernel.lengthscale = PyroSample(dist.LogNormal(0.0, 1.0).expand([Q]).to_event(1))
    model.initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    tree = to_arviz(model, guide, Y, num_samples=3)
    assert tree["posterior"]["u_label"].dims[-2:] == ("outputs_label", "inducing_label")
    assert "views.label.kernel.lengthscale" in tree["posterior"]
    assert model.latent_symmetry().group == "signed permutations"
    with pytest.raises(ValueError, match=r"parameters are learned.*guide\.median"):
        model.relevance("label")


def test_exposures_are_those_of_the_columns_of_a_view():
    exposure = torch.rand(N, 3) + 0.5
    likelihood = {"a": Poisson(), "b": Poisson()}
    options = {"num_inducing": 4, "likelihood": likelihood}
    model = MultiViewGPLVM(N, {"a": 1, "b": 2}, Q, rows=RowArguments(exposure=exposure), **options)
    guide = MeanFieldGuide(model.initialize(torch.ones(N, 3)))
    guide(torch.ones(N, 3))
    X, one = torch.randn(N, Q), RowArguments(exposure=torch.ones(1, 3))
    options = {"num_samples": 1, "seed": 0}
    plain, scaled = (model.predict(guide, X, rows=r, **options).f_mean for r in (one, RowArguments(exposure=exposure)))
    torch.testing.assert_close(scaled - plain, exposure.log(), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="log link"):
        MultiViewGPLVM(N, {"a": 1}, Q, num_inducing=4, rows=RowArguments(exposure=torch.ones(N)))


BINARY, SHARED = Bernoulli(), RBF(Q)
REFUSED = {
    "no view": (lambda: MultiViewGPLVM(N, {}, Q), "one view or more"),
    "name": (lambda: MultiViewGPLVM(N, {"gene expression": 2}, Q), "identifiers"),
    "name of a method": (lambda: MultiViewGPLVM(N, {"items": 2}, Q), "methods of modules"),
    "Student t beside dependent entries": (
        lambda: small_model(likelihood={"sensors": LowRankGaussian(1, 3), "label": StudentT()}),
        "log density is concave",
    ),
    "other columns": (lambda: small_model(likelihood={"label": Gaussian(data_dim=3)}), "outputs"),
    "other view": (
        lambda: small_model(likelihood={"labels": Bernoulli()}),
        r"views among .* in likelihood",
    ),
    "no likelihood": (lambda: small_model(likelihood={"label": "ordinal"}), "expected a likelihood"),
    "shared likelihood": (lambda: small_model(likelihood=dict.fromkeys(DIMS, BINARY)), "of its own for each view"),
    "shared kernel": (lambda: MultiViewGPLVM(N, DIMS, Q, dict.fromkeys(DIMS, SHARED), num_inducing=3), "of its own"),
    "kernel of a batch": (lambda: MultiViewGPLVM(N, DIMS, Q, {"label": RBF(Q, batch_shape=[2])}, num_inducing=3), "batch"),
    "few rows": (lambda: small_model(num_inducing=N + 1), "at least as many rows"),
    "term": (lambda: small_model(likelihood_term="exact"), "likelihood_term in"),
    "errors of a binary view": (lambda: small_model(rows=RowArguments(standard_error=torch.ones(N))), "standard errors"),
    "other rows": (lambda: MultiViewGPLVM.from_data({"a": np.ones((3, 1)), "b": np.ones(4)}), "of the same rows"),
    "other index": (
        lambda: MultiViewGPLVM.from_data({"a": pd.Series([1.0, 2.0]), "b": pd.Series([1.0, 2.0], index=[1, 2])}),
        "same index",
    ),
    "text": (lambda: MultiViewGPLVM.from_data({"a": ["x", "y"]}), "view 'a'"),
    "no mapping": (lambda: small_model().table(np.ones((3, 5))), "mapping"),
    "unknown view": (lambda: small_model().table({"labels": np.ones((3, 5))}), "in the data"),
    "columns": (lambda: small_model().table({"label": np.ones((3, 5))}), "2 columns of view 'label'"),
    "empty": (lambda: small_model().table({}), "one of the views"),
    "threshold": (lambda: small_model().dimensions(5.0), "between 0 and 1"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined(name):
    make, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_refused_predictions():
    model, Y = small_model(), small_table()
    model.initialize(Y)
    guide = MeanFieldGuide(model)
    guide(Y)
    with pytest.raises(ValueError, match="other views than the predicted one"):
        model.predict_view(guide, "label", {"label": np.ones((2, 2))})
    with pytest.raises(ValueError, match="observed entry in every row"):
        model.predict_view(guide, "label", {"sensors": np.full((2, 3), np.nan)})
    with pytest.raises(ValueError, match="views among"):
        model.predict_view(guide, "labels", {"sensors": np.ones((2, 3))})
