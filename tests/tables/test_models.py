"""Tables at the methods of models of rows, fit and the estimators."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
import xarray

from pyro_lvgp import BayesianGPLVM, MeanFieldGuide, RandomFeatureGuide, RandomFeatureLVM, fit
from pyro_lvgp.likelihoods import Ordinal, Poisson
from pyro_lvgp.models import RowArguments
from pyro_lvgp.sklearn import GPLVM, GPLVMImputer

N, D = 30, 4


@pytest.fixture
def frame():
    values = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    values[::5, 1] = np.nan
    return pd.DataFrame(values, index=[f"row {n}" for n in range(N)], columns=list("abcd"))


def fitted(table, **options):
    model = BayesianGPLVM.from_data(table, 2, **options)
    guide = MeanFieldGuide(model)
    fit(model, guide, table, num_steps=3, progress=False)
    return model, guide


def test_frames_give_the_numbers_of_tensors(frame):
    Y = torch.tensor(frame.to_numpy())
    model, guide = fitted(frame)
    other, its_guide = fitted(Y)
    latents, expected = model.infer_latents(guide, frame[:4]), other.infer_latents(its_guide, Y[:4])
    torch.testing.assert_close(latents.mean, expected.mean)
    filled = model.impute(guide, frame[:4].astype("Float64"), latents=latents, seed=0)
    torch.testing.assert_close(filled.mean, other.impute(its_guide, Y[:4], latents=expected, seed=0).mean)
    torch.testing.assert_close(model.training_prior(guide, frame).mean, other.training_prior(its_guide, Y).mean)


def test_predictions_have_the_labels_of_frames(frame):
    model, guide = fitted(frame)
    new = frame.iloc[3:6]
    for y in (
        model.impute(guide, new, latents=model.infer_latents(guide, new)),
        model.reconstruct(guide, new, torch.arange(3, 6)),
    ):
        assert y.to_pandas().index.equals(new.index)
        assert y.to_pandas().columns.equals(new.columns)
        assert y.to_xarray(()).coords["output"].values.tolist() == list("abcd")
    latents = pd.DataFrame(np.zeros((2, 2)), index=["first", "second"])
    assert model.predict(guide, latents).to_pandas().index.tolist() == ["first", "second"]
    assert model.predict(guide, torch.zeros(1, 2)).to_pandas().columns.tolist() == list("abcd")
    assert model.predictive(guide, latents).mean.shape == (2, D)


def test_observed_entries_stay(frame):
    model, guide = fitted(frame)
    filled = model.impute(guide, frame).to_pandas()
    pd.testing.assert_frame_equal(filled[frame.notna()], frame)
    assert not filled.isna().any(axis=None)


def test_arrays_of_xarray_keep_dimensions_and_labels(frame):
    table = xarray.DataArray(frame.to_numpy(), dims=("day", "station"), coords={"station": list("abcd")})
    model, guide = fitted(table)
    filled = model.impute(guide, table).to_xarray()
    assert filled["mean"].dims == ("day", "station")
    assert filled.coords["station"].values.tolist() == list("abcd")
    xarray.testing.assert_allclose(filled["mean"].where(table.notnull()).drop_vars("day"), table)


def test_sparse_counts_are_dense_counts():
    counts = np.random.default_rng(0).poisson(0.5, (N, D))
    _, guide = fitted(sp.csr_array(counts), likelihood=Poisson())
    _, its_guide = fitted(torch.tensor(counts).float(), likelihood=Poisson())
    torch.testing.assert_close(guide.median()["X"], its_guide.median()["X"])


def test_ordered_categories_are_levels_of_an_ordinal_likelihood():
    levels = pd.CategoricalDtype(["no", "perhaps", "yes"], ordered=True)
    codes = np.random.default_rng(0).integers(3, size=(N, D))
    table = pd.DataFrame({f"q{d}": pd.Categorical.from_codes(codes[:, d], dtype=levels) for d in range(D)})
    model, guide = fitted(table, likelihood=Ordinal(torch.tensor([-0.5, 0.5])))
    torch.testing.assert_close(
        model.reconstruct(guide, table).with_observed(torch.tensor(codes).float()).mean.numpy(), codes.astype("f")
    )


def test_columns_in_another_order_are_refused(frame):
    model, guide = fitted(frame)
    with pytest.raises(
        ValueError, match=r"in the order of the training data, \['a', 'b', 'c', 'd'\], got \['b', 'a', 'c', 'd'\]"
    ):
        model.infer_latents(guide, frame[["b", "a", "c", "d"]])
    with pytest.raises(ValueError, match=r"expected the columns of the training data"):
        model.impute(guide, frame.rename(columns={"a": "e"}))
    with pytest.raises(ValueError, match="order of the training data"):
        fit(model, guide, frame[["b", "a", "c", "d"]], num_steps=1, progress=False)
    model.infer_latents(guide, frame[["b", "a", "c", "d"]].to_numpy())  # an array has no labels


def test_random_feature_models(frame):
    model = RandomFeatureLVM(N, D, 2, num_frequencies=5).initialize(frame)
    guide = RandomFeatureGuide(model)
    fit(model, guide, frame, optim=guide.blocks(), num_steps=2, progress=False)
    assert model.impute(guide, frame).to_pandas().index.equals(frame.index)


def test_known_quantities_of_rows(frame):
    table = pd.DataFrame({"depth": np.arange(1, N + 1), "x": np.linspace(0, 1, N, dtype=np.float32)})
    rows = RowArguments(covariates=table[["x"]], weight=table["depth"], exposure=table["depth"].to_numpy())
    assert rows.covariates.dtype == rows.weight.dtype == torch.float32
    torch.testing.assert_close(rows.exposure[:, 0], torch.arange(1.0, N + 1))
    with pytest.raises(ValueError, match=r"expected numbers in the columns of covariates.*got others in \['batch'\]"):
        RowArguments(covariates=pd.DataFrame({"batch": list("abc")}))


@pytest.mark.parametrize("convert", [lambda x: x, np.asarray, xarray.DataArray, lambda x: torch.tensor(x.to_numpy())])
def test_transformers(frame, convert):
    gplvm = GPLVM(max_iter=2, random_state=0)
    expected = gplvm.fit_transform(frame.to_numpy())
    np.testing.assert_allclose(gplvm.fit_transform(convert(frame)), expected)


def test_transformers_of_sparse_and_nullable_tables(frame):
    counts = np.random.default_rng(0).poisson(1.0, (N, D)).astype(float)
    gplvm = GPLVM(likelihood=Poisson(), max_iter=2, random_state=0)
    np.testing.assert_allclose(gplvm.fit_transform(sp.csr_array(counts)), gplvm.fit_transform(counts))
    imputer = GPLVMImputer(max_iter=2, n_folds=1, random_state=0).set_output(transform="pandas")
    filled = imputer.fit_transform(frame.astype("Float32"))
    assert filled.index.equals(frame.index)
    assert not filled.isna().any(axis=None)


def test_a_table_that_is_none(frame):
    model, guide = fitted(frame)
    for call in (
        lambda: model.impute(guide, "text"),
        lambda: model.infer_latents(guide, None),
        lambda: fit(model, guide, "text"),
    ):
        with pytest.raises(ValueError, match="expected Y to be a table of numbers"):
            call()
