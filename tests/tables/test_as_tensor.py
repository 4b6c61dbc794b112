"""Tables of other libraries as tensors."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
import xarray

from pyro_lvgp._utils.tables import as_double_tensor, numeric_table
from pyro_lvgp.tables import as_tensor

NAN = torch.nan
LEVELS = pd.CategoricalDtype(["low", "middle", "high"], ordered=True)


def assert_values(table, values, dtype=torch.float32):
    torch.testing.assert_close(as_tensor(table), torch.tensor(values, dtype=dtype), equal_nan=True, rtol=0, atol=0)


def test_tensors_are_returned_as_they_are():
    table = torch.arange(3)
    assert as_tensor(table) is table


def test_arrays_have_their_precision_and_integers_the_default():
    for dtype, expected in ((np.float32, torch.float32), (np.float64, torch.float64), (np.int64, torch.float32)):
        assert as_tensor(np.ones((2, 2), dtype)).dtype == expected
    assert as_tensor(np.ones((2, 2)), like=torch.zeros(1)).dtype == torch.float32


def test_integers_keep_their_digits_in_double_precision():
    seconds = pd.DataFrame({"t": [1_700_000_000, 1_700_000_001, 1_700_000_002]})
    for table in (seconds, seconds.to_numpy(), seconds.astype("Int64"), sp.csr_matrix(seconds)):
        assert as_double_tensor(table, name="t").diff(dim=0).tolist() == [[1.0], [1.0]]
        assert as_tensor(table, like=torch.zeros(1, dtype=torch.float64)).diff(dim=0).tolist() == [[1.0], [1.0]]


def test_integers_of_frames_have_the_precision_that_estimators_give_those_of_arrays():
    array = np.array([[1, 2], [3, 4]])
    for table in (pd.DataFrame(array), sp.csr_matrix(array), xarray.DataArray(array), np.ma.masked_equal(array, 3)):
        assert np.asarray(numeric_table(table)).dtype == np.float64


def test_rows_in_reverse_order():
    array = np.arange(4.0).reshape(2, 2)
    for table in (array[::-1], pd.DataFrame(array)[::-1]):
        assert as_tensor(table).tolist() == [[2.0, 3.0], [0.0, 1.0]]


def test_durations_are_divided_by_one():
    durations = pd.to_timedelta([0, 90], unit="min")
    with pytest.raises(ValueError, match=r"divide durations by one, such as pandas.Timedelta\(hours=1\)"):
        as_tensor(durations)
    assert as_tensor(durations / pd.Timedelta(hours=1)).tolist() == [0.0, 1.5]


def test_results_share_no_memory_with_tables():
    array = np.zeros((2, 2))
    tensor = as_tensor(array)
    array[0, 0] = 1.0
    assert tensor[0, 0] == 0.0


def test_masked_entries_and_none_are_missing():
    assert_values(np.ma.masked_equal([[1, 2], [3, 4]], 3), [[1.0, 2.0], [NAN, 4.0]])
    assert_values([[1, None], [2, 3]], [[1.0, NAN], [2.0, 3.0]], torch.float64)
    assert_values(np.array([1, pd.NA], dtype=object), [1.0, NAN], torch.float64)


def test_nullable_and_mixed_columns_of_pandas():
    table = pd.DataFrame(
        {
            "count": pd.array([1, None, 3], dtype="Int64"),
            "flag": pd.array([True, None, False], dtype="boolean"),
            "level": pd.Categorical(["low", None, "high"], dtype=LEVELS),
            "single": pd.array([0.5, None, 1.5], dtype="Float32"),
        }
    )
    expected = [[1.0, 1.0, 0.0, 0.5], [NAN, NAN, NAN, NAN], [3.0, 0.0, 2.0, 1.5]]
    assert_values(table, expected)
    assert_values(table["count"], [1.0, NAN, 3.0])
    assert as_tensor(table.assign(real=[0.1, 0.2, 0.3])).dtype == torch.float64


def test_columns_of_one_type_and_of_sparse_pandas():
    assert_values(pd.DataFrame({"a": [1, 2], "b": [True, False]}), [[1.0, 1.0], [2.0, 0.0]])
    assert_values(pd.DataFrame.sparse.from_spmatrix(sp.eye(2, format="csr")), [[1.0, 0.0], [0.0, 1.0]], torch.float64)


@pytest.mark.parametrize("make", [sp.csr_matrix, sp.csc_array, sp.coo_array])
def test_entries_of_sparse_counts_that_are_not_stored_are_zeros(make):
    counts = np.array([[0, 3, 0], [1, 0, 0]], np.float32)
    assert_values(make(counts), counts.tolist())


def test_arrays_of_xarray():
    table = xarray.DataArray([[1.0, NAN]], dims=("day", "station"), coords={"station": ["a", "b"]})
    assert_values(table, [[1.0, NAN]], torch.float64)


def test_frames_of_polars():
    pl = pytest.importorskip("polars")
    table = pl.DataFrame(
        {
            "count": [1, None, 3],
            "flag": [True, None, False],
            "level": pl.Series(["low", None, "high"], dtype=pl.Enum(["low", "middle", "high"])),
            "group": pl.Series(["u", "v", None], dtype=pl.Categorical),
        }
    )
    assert_values(table, [[1.0, 1.0, 0.0, 0.0], [NAN, NAN, NAN, 1.0], [3.0, 0.0, 2.0, NAN]])
    assert_values(table["count"], [1.0, NAN, 3.0])
    with pytest.raises(ValueError, match=r"got others in \['text'\]"):
        as_tensor(table.with_columns(text=pl.lit("x")))


@pytest.mark.parametrize(
    "column",
    [["x", "1", "2"], pd.date_range("2020-01-01", periods=3), pd.Categorical(["a", "b", "c"]), [1j, 2j, 3j], [1, "2", 3]],
    ids=["text", "dates", "unordered", "complex", "mixed"],
)
def test_other_columns_are_named(column):
    table = pd.DataFrame({"good": [1.0, 2.0, 3.0], "bad": column})
    with pytest.raises(ValueError, match=r"got others in \['bad'\]; drop them: table.drop\(columns=\[...\]\)"):
        as_tensor(table)
    assert as_tensor(table.drop(columns=["bad"])).shape == (3, 1)


def test_the_advice_on_text_of_numbers():
    table = pd.DataFrame({"text": ["1.5", None, "2"]})
    with pytest.raises(ValueError, match=r"text of numbers: table\[column\] = pandas.to_numeric\(table\[column\]\)"):
        as_tensor(table)
    table["text"] = pd.to_numeric(table["text"])
    assert_values(table, [[1.5], [NAN], [2.0]], torch.float64)


def test_the_advice_on_unordered_categories():
    table = pd.DataFrame({"kind": pd.Categorical(["a", "b", "c"])})
    assert_values(pd.get_dummies(table, columns=["kind"], dtype=float), torch.eye(3).tolist(), torch.float64)
    ordered = table["kind"].astype(pd.CategoricalDtype(["c", "b", "a"], ordered=True))
    assert_values(ordered.to_frame(), [[2.0], [1.0], [0.0]])


@pytest.mark.parametrize("table", ["text", object(), int, [[1], [1, 2]], [["a", 1]], None, np.array([1j])])
def test_what_is_no_table(table):
    with pytest.raises(ValueError, match=r"expected the table to be a table of numbers, got .*; pass a tensor, an array"):
        as_tensor(table)
