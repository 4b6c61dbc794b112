"""The benchmark of known quantities of rows: every table is fitted with and without the argument."""

import math

import pytest

from benchmarks.tasks import row_arguments


@pytest.mark.parametrize("name", row_arguments.TASKS)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_each_table_is_fitted_with_and_without_the_argument(name: str):
    measurements = list(row_arguments.measure(name, seed=0, num_steps=3))
    methods = {each.method for each in measurements}
    assert {"with", "without"} <= methods
    by_method = {method: {each.metric for each in measurements if each.method == method} for method in methods}
    assert all(metrics == by_method["with"] for metrics in by_method.values())
    assert all(math.isfinite(each.value) for each in measurements)


def test_initial_latents_of_narrow_priors_are_better_than_none():
    scores = {(each.method, each.metric): each.value for each in row_arguments.measure("capture times", seed=0, num_steps=3)}
    assert scores["with", "rank correlation"] > scores["without", "rank correlation"]
