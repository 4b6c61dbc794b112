import pytest
import torch

from benchmarks.peers import imputers
from benchmarks.tasks.recordings import OURS, Recording, measure

N = 60


@pytest.fixture
def recording(float64):
    t = torch.arange(float(N))
    Y = torch.sin(t[:, None] / 5.0) * torch.tensor([1.0, 2.0, -1.0]) + 0.01 * torch.randn(N, 3)
    hidden = torch.zeros(N, 3, dtype=torch.bool)
    hidden[40:50, 0] = True
    return Recording(t, Y, hidden, ("Bayesian ridge", "linear interpolation"))


@pytest.mark.parametrize("impute", [imputers.ridge, imputers.neighbours, imputers.spline, imputers.daily_processes])
def test_peers_fill_hidden_entries_alone_and_do_not_see_them(recording, impute):
    t, Y, hidden = recording.t, recording.Y, recording.hidden
    mean, _ = impute(t, Y, hidden)
    assert torch.equal(mean[~hidden], Y[~hidden])
    changed, _ = impute(t, Y + 100.0 * hidden, hidden)
    torch.testing.assert_close(changed[hidden], mean[hidden])


@pytest.mark.parametrize("impute", [imputers.ridge, imputers.neighbours])
def test_regressions_are_close_for_outputs_that_are_proportional(recording, impute):
    mean, _ = impute(recording.t, recording.Y, recording.hidden)
    assert (mean - recording.Y)[recording.hidden].abs().max() < 0.3


def test_rows_without_outputs_have_the_moments_of_the_output(recording):
    hidden = recording.hidden.clone()
    hidden[10] = True
    mean, stddev = imputers.ridge(recording.t, recording.Y, hidden)
    train = ~hidden[:, 1]
    torch.testing.assert_close(mean[10, 1], recording.Y[train, 1].mean())
    torch.testing.assert_close(stddev[10, 1], recording.Y[train, 1].std())


def test_scores_of_a_known_prediction(recording):
    mean, stddev = recording.Y + 1.0, torch.ones_like(recording.Y)
    scores = dict(recording.scores(mean, stddev, None))
    truth = recording.Y[40:50, 0]
    assert scores["RMSE"] == pytest.approx(1.0)
    assert scores["SMSE"] == pytest.approx(1.0 / truth.var(correction=0).item())
    assert scores["NLL"] == pytest.approx(0.5 + 0.9189385)
    assert scores["coverage"] == 1.0


def test_all_methods_are_measured_on_data_with_gaps_of_their_own(recording):
    recording.Y[5, 1] = torch.nan
    measured = list(measure("toy", recording, 3))
    assert {"Bayesian ridge", "linear interpolation", OURS} <= {m.method for m in measured}
    assert all(torch.tensor(m.value).isfinite() for m in measured)
