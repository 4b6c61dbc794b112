from benchmarks.core.report import aggregate
from benchmarks.tasks import large_data


def test_every_method_is_timed_on_data_of_every_size():
    rows = aggregate(list(large_data.run(quick=True, seeds=1)))
    methods = {f"{guide}, {optim}" for guide in large_data.GUIDES for optim in large_data.OPTIMIZERS}
    assert {(row.dataset, row.method) for row in rows} == {
        (f"{size} rows", method) for size in large_data.QUICK_SIZES for method in methods
    }
    values = {(row.dataset, row.metric): row.mean for row in rows}
    assert values["300 rows", "/ fewest rows"] == 1.0
    assert all(row.mean > 0.0 for row in rows)
