"""The benchmark of several views: every data set, with the same scores for all methods."""

import math

import pytest

from benchmarks.tasks import views


@pytest.mark.parametrize("name", views.TASKS)
@pytest.mark.filterwarnings("ignore")
def test_each_data_set_is_scored_for_every_method(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "NUM_ROWS", 60)
    monkeypatch.setattr(views, "NUM_COLUMNS", 3)
    measurements = list(views.measure(name, seed=0, num_steps=3))
    methods = {each.method: {m.metric for m in measurements if m.method == each.method} for each in measurements}
    assert len(methods) >= 3
    assert all(metrics == methods["two views"] - {"recovered"} for method, metrics in methods.items() if method != "two views")
    assert all(math.isfinite(each.value) for each in measurements)
