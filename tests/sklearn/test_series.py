"""Data frames and dates in, labels out."""

import datetime

import numpy as np
import pandas as pd
import pytest
import torch

from pyro_lvgp.sklearn import GPLVMImputer, GPVAERegressor
from pyro_lvgp.sklearn._series import TimeAxis, as_dates
from pyro_lvgp.tables import as_tensor

HOURS = pd.date_range("2024-03-01", periods=40, freq="h", tz="Europe/Berlin", name="hour")


@pytest.fixture
def frame():
    angle = 2.0 * np.pi * np.arange(40) / 24.0
    frame = pd.DataFrame({"a": np.sin(angle), "b": np.cos(angle), "n": pd.array([1, None] * 20, dtype="Int64")}, index=HOURS)
    frame.iloc[10:20, 0] = np.nan
    return frame


def quick(**kwargs):
    return GPVAERegressor(n_folds=1, max_iter=5, **kwargs)


def test_frames_over_dates_are_those_over_numbers_and_keep_their_labels(frame):
    numbers = torch.tensor(frame.to_numpy(dtype=float, na_value=np.nan))
    expected = quick(period=24.0).fit(torch.arange(40.0), numbers).predict()
    gpvae = quick(period=pd.Timedelta(days=1)).fit(frame.index, frame)
    assert gpvae.time_unit_ == "hours"
    predicted = gpvae.predict()
    torch.testing.assert_close(predicted.mean, expected.mean)
    table = predicted.to_pandas("stddev")
    pd.testing.assert_index_equal(table.index, frame.index)
    pd.testing.assert_index_equal(table.columns, frame.columns)
    np.testing.assert_allclose(table.to_numpy(), expected.stddev)
    assert list(predicted.to_xarray().coords["output"].values) == ["a", "b", "n"]
    ahead = HOURS[-2:] + pd.Timedelta(hours=5)
    later = gpvae.predict(ahead)
    torch.testing.assert_close(later.coords["x"][1], torch.tensor([[43.0], [44.0]]).double())
    pd.testing.assert_index_equal(later.to_pandas().index, ahead)


@pytest.mark.parametrize(
    ("dates", "unit", "numbers"),
    [
        (pd.period_range("2000Q1", periods=3, freq="Q"), "days", [0.0, 91.0, 182.0]),
        (pd.Series(pd.date_range("2024-01-01", periods=3, freq="30min")), "minutes", [0.0, 30.0, 60.0]),
        (np.array(["2024-01-01T00:00:00.0", "2024-01-01T00:00:00.5"], dtype="datetime64[ms]"), "seconds", [0.0, 0.5]),
        ([datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)], "days", [0.0, 1.0]),
        (pd.DatetimeIndex(["2024-01-01"]), "seconds", [0.0]),
        ([datetime.date(2024, 1, 1), datetime.date(2024, 1, 3)], "days", [0.0, 2.0]),
        (pd.DatetimeIndex(["1700-01-01", "2100-01-01"]).as_unit("ns"), "days", [0.0, 146097.0]),
        (np.array(["2000-01-01", "2500-01-01T12"], dtype="datetime64[s]"), "days", [0.0, 182622.5]),
        (np.array([0, 1, 3], dtype="datetime64[ns]"), "seconds", [0.0, 1e-9, 3e-9]),
    ],
)
def test_dates_are_numbers_in_the_largest_unit_of_their_steps(dates, unit, numbers):
    axis = TimeAxis.of(as_dates(dates))
    assert axis.unit == unit
    torch.testing.assert_close(axis.numbers(as_dates(dates)), torch.tensor(numbers, dtype=torch.float64)[:, None])


def test_dates_of_other_centuries_than_those_of_a_fit():
    axis = TimeAxis.of(as_dates(pd.date_range("2000-01-01", periods=3).as_unit("ns")))
    dates = np.array(["1500-01-01", "2500-01-01"], dtype="datetime64[s]")
    assert axis.numbers(as_dates(dates)).flatten().tolist() == [-182621.0, 182622.0]


def test_summer_time_has_no_hour_twice():
    dates = as_dates(pd.date_range("2024-10-27", periods=5, freq="h", tz="Europe/Berlin"))
    assert TimeAxis.of(dates).numbers(dates).flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("zone", "advice"), [(None, "tz_localize\\(None\\)"), ("Europe/Berlin", "tz_localize\\(zone\\)")])
def test_dates_with_a_zone_are_not_taken_for_dates_without(zone, advice):
    dates = pd.date_range("2024-01-01", periods=3, freq="h", tz=zone)
    axis = TimeAxis.of(as_dates(dates))
    others = dates.tz_localize("UTC") if zone is None else dates.tz_localize(None)
    with pytest.raises(ValueError, match=f"a time zone, as in fit, .*{advice}"):
        axis.numbers(as_dates(others))
    if zone is not None:  # the same hours in another zone
        assert axis.numbers(as_dates(dates.tz_convert("Asia/Tokyo"))).flatten().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("values", [torch.arange(3), np.arange(3.0), ["a", "b"], pd.Series([1.0]), np.zeros((2, 2))])
def test_other_values_are_no_dates(values):
    assert as_dates(values) is None


def test_tables_with_missing_values_of_pandas_are_numbers():
    mixed = pd.DataFrame({"a": pd.array([True, None], dtype="boolean"), "b": [1, 2], "c": [None, 2.5]})
    expected = torch.tensor([[1.0, 1.0, torch.nan], [torch.nan, 2.0, 2.5]], dtype=torch.float64)
    torch.testing.assert_close(as_tensor(mixed), expected, equal_nan=True)


def test_what_does_not_fit_is_named(frame):
    with pytest.raises(ValueError, match=r"expected numbers in the columns of y, .* got others in \['c'\]; drop them"):
        quick().fit(frame.index, frame.assign(c="x"))
    with pytest.raises(ValueError, match="expected y to be a table of numbers, got list"):
        quick().fit(frame.index, [["x"]] * 40)
    with pytest.raises(ValueError, match="expected a date for each row, got 4 missing ones; drop these rows"):
        quick().fit(frame.index.where(np.arange(40) > 3), frame)
    for period, inputs in ((24.0, frame.index), (pd.Timedelta(days=1), np.arange(40.0))):
        with pytest.raises(ValueError, match="a number as the period of numbers, and a duration"):
            quick(period=period).fit(inputs, frame)
    with pytest.raises(ValueError, match="positive period"):
        quick(period=pd.Timedelta(days=-1)).fit(frame.index, frame)
    over_dates, over_numbers = quick().fit(frame.index, frame), quick().fit(np.arange(40.0), frame)
    with pytest.raises(ValueError, match="expected dates as inputs, as in fit, got numbers"):
        over_dates.predict([1.0])
    with pytest.raises(ValueError, match="expected numbers as inputs, as in fit, got dates"):
        over_numbers.predict(frame.index)


def test_dates_that_are_text_or_a_column_of_a_table_are_to_be_converted(frame):
    for inputs in (frame.index.astype(str), frame.reset_index()[["hour"]]):
        with pytest.raises(ValueError, match=r"got .*; pass dates as one index or series of pandas.to_datetime\(\.\.\.\)"):
            quick().fit(inputs, frame)


def test_new_inputs_have_the_columns_of_the_fit():
    places = pd.DataFrame({"lat": torch.rand(12).tolist(), "lon": torch.rand(12).tolist()})
    gpvae = GPVAERegressor(n_folds=1, max_iter=2).fit(places, torch.randn(12, 2))
    expected = gpvae.predict(places.to_numpy()[:2]).mean
    torch.testing.assert_close(gpvae.predict(places[:2]).mean, expected)
    with pytest.raises(ValueError, match=r"expected the columns of X in the order .*\['lat', 'lon'\], got \['lon', 'lat'\]"):
        gpvae.predict(places[["lon", "lat"]])
    with pytest.raises(ValueError, match=r"of 2 columns, got \[3, 1\]"):
        gpvae.predict([0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="expected finite inputs"):
        gpvae.predict(places.where(places > places.min()))


def test_predictions_of_tables_keep_their_labels(frame):
    frame = frame.astype(float)
    predicted = GPLVMImputer(max_iter=5, n_folds=1, random_state=0).fit(frame).predictive(frame.iloc[8:12])
    table = predicted.to_pandas(0.5)
    pd.testing.assert_index_equal(table.index, frame.index[8:12])
    pd.testing.assert_index_equal(table.columns, frame.columns)
    pd.testing.assert_series_equal(table["b"], frame["b"].iloc[8:12])
