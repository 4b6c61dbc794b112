import numpy as np
import pytest

from benchmarks.core.memory import resident_megabytes
from benchmarks.core.report import aggregate
from benchmarks.tasks import exponents, large_data, million_rows


def test_every_method_is_timed_on_data_of_every_size():
    rows = aggregate(list(large_data.run(quick=True, seeds=1)))
    methods = {f"{guide}, {optim}" for guide in large_data.GUIDES for optim in large_data.OPTIMIZERS}
    assert {(row.dataset, row.method) for row in rows} == {
        (f"{size} rows", method) for size in large_data.QUICK_SIZES for method in methods
    }
    values = {(row.dataset, row.metric): row.mean for row in rows}
    assert values["300 rows", "/ fewest rows"] == 1.0
    assert all(row.mean > 0.0 for row in rows)


@pytest.mark.parametrize("name", million_rows.TASKS)
def test_a_model_is_fitted_to_a_file(name):
    rows = aggregate(list(million_rows.run(quick=True, seeds=1, only=name)))
    values = {row.metric: row.mean for row in rows}
    assert 0.0 < values["memory, first step [MB]"] <= values["first tenth [MB]"]
    assert values["RMSE"] < 0.7, values  # the standard deviation of the sines


def test_pages_of_files_can_be_left_out_of_the_memory(tmp_path):
    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (1_000_000, 10))
    rows[:] = 1.0
    before = resident_megabytes(), resident_megabytes(of_files=False)
    del rows
    after = resident_megabytes(), resident_megabytes(of_files=False)
    assert before[0] - after[0] > 35.0
    assert abs(before[1] - after[1]) < 5.0


def test_the_exponent_of_each_size_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(exponents, "GRID", {"D": (2, 4), "K": (1, 2)})
    monkeypatch.setattr(exponents, "TASKS", ("D", "K"))
    monkeypatch.setattr(exponents, "BASE", exponents.BASE | {"N": 20, "B": 5, "M": 3})
    rows = aggregate(list(exponents.run(quick=True, seeds=1, picture=tmp_path / "picture.png")))
    assert {(row.method, row.metric) for row in rows} == {
        (name, metric) for name in ("D", "K") for metric in ("size 1", "size 2", "exponent")
    }
    assert (tmp_path / "picture.png").stat().st_size > 0
