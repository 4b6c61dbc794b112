"""The benchmark of advised RFLVM measures it beside t-SNE, on the splits of ``srflvm_layout``."""

import pytest

pytest.importorskip("gpytorch")

from benchmarks.tasks import srflvm_advised, srflvm_layout
from benchmarks.tasks.srflvm import Task
from tests.helpers.counts_of_kinds import counts_of_kinds


def test_advised_rflvm_is_measured_beside_tsne():
    measurements = srflvm_layout.measure(srflvm_advised.ADVISED, "toy", Task(*counts_of_kinds(9.0)), seed=0, num_steps=3)
    found = {(one.method, one.metric): one for one in measurements}
    assert {metric for method, metric in found if method == srflvm_layout.TSNE} == {srflvm_layout.ACCURACY}
    own = {metric: one.value for (method, metric), one in found.items() if method == "advised RFLVM"}
    assert set(own) == {srflvm_layout.ACCURACY, srflvm_layout.DIFFERENCE, srflvm_layout.BOUND}
    assert own[srflvm_layout.ACCURACY] > 0.7
    assert found["advised RFLVM", srflvm_layout.BOUND].settings["steps"] == 3
