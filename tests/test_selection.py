"""Choice by held-out entries: folds, and scores against the definition."""

import pyro
import pytest
import torch
from torch.distributions import Independent, Normal

from pyro_lvgp.selection import gap_folds, held_out_nll

nan = torch.nan


@pytest.fixture
def y():
    """60 rows; the last two columns are missing at the end, the last in one more row."""
    y = torch.randn(60, 4, dtype=torch.float64)
    y[40:, 2:] = nan
    y[7, 3] = nan
    return y


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize("num_folds", [1, 3, 39])
def test_folds_deal_out_all_complete_rows_in_the_columns_with_gaps(y, consecutive, num_folds):
    folds = gap_folds(y, num_folds, consecutive=consecutive)
    complete = ~torch.isnan(y).any(1)
    assert torch.equal(folds.sum(0), complete[:, None] * torch.tensor([0, 0, 1, 1]))
    sizes = folds[..., 2].sum(1)
    assert len(folds) == num_folds
    assert sizes.max() - sizes.min() <= 1


def test_folds_are_runs_of_rows_or_rows_here_and_there(y):
    runs = gap_folds(y, 3, consecutive=True)[:, :, 2].long()
    assert [rows.nonzero()[[0, -1]].flatten().tolist() for rows in runs] == [[0, 13], [14, 26], [27, 39]]
    scattered = gap_folds(y, 3)
    assert (scattered[0, :, 2].long().diff() != 0).sum() > 6
    assert torch.equal(scattered, gap_folds(y, 3))
    assert not torch.equal(scattered, gap_folds(y, 3, seed=1))


def test_folds_need_gaps_and_rows(y):
    with pytest.raises(ValueError, match="expected data with gaps"):
        gap_folds(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="from 1 to 39 folds"):
        gap_folds(y, 40)
    with pytest.raises(ValueError, match="from 1 to 0 folds"):
        gap_folds(torch.full((3, 1), nan))


def test_scores_are_means_over_what_was_observed_and_hidden(y):
    folds = gap_folds(y, 3)
    folds[0, 40:] = True  # of which the last two columns were never observed
    seen = []

    def predict(shown):
        seen.append(torch.isnan(shown))
        return Normal(shown.nanmean(0), 2.0)

    scores = held_out_nll({"columns": predict}, y, folds, progress=False)
    expected, number = 0.0, 0
    for fold, hidden in zip(folds, seen, strict=True):
        assert torch.equal(hidden, fold | torch.isnan(y))
        held = fold & ~torch.isnan(y)
        mean = torch.stack([y[~hidden[:, d], d].mean() for d in range(4)]).expand_as(y)
        expected -= Normal(mean[held], 2.0).log_prob(y[held]).sum().item()
        number += int(held.sum())
    assert number == 39 * 2 + 20 * 2
    assert scores == {"columns": pytest.approx(expected / number)}


def test_the_better_candidate_comes_first(y):
    y = 0.1 * y + torch.arange(4)
    candidates = {
        "one number": lambda shown: Normal(shown[~torch.isnan(shown)].mean(), shown[~torch.isnan(shown)].std()),
        "columns": lambda shown: Normal(shown.nanmean(0), 0.1),
        "columns, unsure": lambda shown: Normal(shown.nanmean(0), 0.3),
    }
    scores = held_out_nll(candidates, y, gap_folds(y), progress=False)
    assert list(scores) == ["columns", "columns, unsure", "one number"]
    assert list(scores.values()) == sorted(scores.values())


def test_no_fit_starts_where_another_ended(y):
    starts = []

    def predict(shown):
        starts.append(pyro.param("loc", torch.zeros(())).item())
        with torch.no_grad():
            pyro.param("loc").add_(1.0)
        return Normal(shown.nanmean(0), 1.0)

    held_out_nll({"first": predict, "second": predict}, y, gap_folds(y, 2), progress=False)
    assert starts == [0.0] * 4
    assert not list(pyro.get_param_store())


def test_nothing_hidden_and_nan_are_refused(y):
    with pytest.raises(ValueError, match="folds that hide observed entries"):
        held_out_nll({}, y, [torch.isnan(y)])
    with pytest.raises(ValueError, match="candidate 'copy', got NaN"):
        held_out_nll({"copy": lambda shown: Normal(shown, 1.0, validate_args=False)}, y, gap_folds(y), progress=False)


def test_other_shapes_are_refused(y):
    with pytest.raises(ValueError, match=r"expected data \[rows, columns\], got \[2, \d+, \d+\]"):
        gap_folds(torch.stack([y, y]))
    with pytest.raises(ValueError, match="expected folds of the data's shape"):
        held_out_nll({}, y, [torch.isnan(y)[:, :1]])
    with pytest.raises(ValueError, match=r"expected log densities of shape .* from candidate 'sum'"):
        held_out_nll({"sum": lambda shown: Independent(Normal(torch.zeros_like(y), 1.0), 1)}, y, gap_folds(y), progress=False)
