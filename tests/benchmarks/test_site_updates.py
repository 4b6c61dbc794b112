"""The benchmark of site updates: hidden entries are not seen, and numbers of updates differ in their predictions."""

import math

import pytest
import torch

from benchmarks.tasks.site_updates import NUMBERS_OF_UPDATES, measure, scores, trials_by_name

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("task", ["linear", "sparse"])
def test_each_number_of_updates_has_scores_of_each_test(task):
    t, Y = torch.linspace(0.0, 1.0, 130)[:, None], torch.randn(7, 130, 7)
    measured = list(measure(task, t, Y, seed=0, num_steps=2))
    assert len(measured) == 5 * len(NUMBERS_OF_UPDATES) * 4
    assert all(math.isfinite(each.value) for each in measured)
    densities = {each.value for each in measured if (each.dataset, each.metric) == ("six electrodes", "NLL")}
    assert len(densities) == len(NUMBERS_OF_UPDATES)


@pytest.mark.parametrize("name", trials_by_name(torch.zeros(1, 130, 7)))
def test_models_do_not_see_hidden_entries(name):
    trials = trials_by_name(torch.randn(2, 130, 7))[name]

    class Model:
        def predict(self, guide, t, y, *, num_samples):
            assert torch.equal(y.isnan(), trials.hidden)
            torch.testing.assert_close(y[~trials.hidden], trials.Y[~trials.hidden])
            raise InterruptedError

    with pytest.raises(InterruptedError):
        scores(Model(), None, torch.zeros(130, 1), trials)
