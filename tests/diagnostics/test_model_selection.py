"""Choice by held-out entries: folds, and scores against the definition."""

import math

import pyro
import pytest
import torch
from torch.distributions import Independent, Normal

from pyro_lvgp.diagnostics import gap_folds, held_out_log_prob, held_out_nll, stacking_weights

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
    y[7, 2:] = nan if not consecutive else y[7, 2:]  # gaps are alike
    folds = gap_folds(y, num_folds, consecutive=consecutive)
    complete = ~torch.isnan(y).any(1)
    assert torch.equal(folds.sum(0), complete[:, None] * torch.tensor([0, 0, 1, 1]))
    sizes = folds[..., 2].sum(1)
    assert len(folds) == num_folds
    assert sizes.max() - sizes.min() <= 1


def test_scattered_folds_leave_something_of_each_row():
    """Gaps of two rows may cover all columns."""
    y = torch.randn(57, 3)
    y[torch.rand(57, 3) < 0.4] = nan
    folds = gap_folds(y, 3)
    told = ~torch.isnan(y)
    assert not (folds & ~told).any()
    assert ((told & ~folds).any(-1) == told.any(-1)).all()
    assert folds.any(0)[told.sum(1) > 1].any(1).float().mean() > 0.5


def test_scattered_folds_have_the_gaps_of_other_rows():
    """Of which none is a whole row."""
    y = torch.randn(300, 6)
    y[torch.rand(300, 6) < 0.2] = nan
    missing = torch.isnan(y)
    y[missing.all(1)], missing = 0.0, torch.isnan(y)
    folds = gap_folds(y, 5)
    assert folds.any(2).sum(0).max() == 1
    hidden, others = folds.any(0), missing[missing.any(1)]
    assert not (hidden & missing).any()
    for row, gaps in zip(hidden, missing, strict=True):
        assert (row == others & ~gaps).all(1).any()
    share = hidden.float().mean(0)
    assert (share - others.float().mean(0) * (~missing).float().mean(0)).abs().max() < 4.5 * (0.25 / 300) ** 0.5


def test_folds_are_runs_of_rows_or_rows_here_and_there(y):
    runs = gap_folds(y, 3, consecutive=True)[:, :, 2].long()
    assert [rows.nonzero()[[0, -1]].flatten().tolist() for rows in runs] == [[0, 13], [14, 26], [27, 39]]
    scattered = gap_folds(y, 3)
    assert (scattered[0, :, 2].long().diff() != 0).sum() > 6
    assert torch.equal(scattered, gap_folds(y, 3))
    assert not torch.equal(scattered, gap_folds(y, 3, seed=1))


@pytest.mark.parametrize("consecutive", [True, False])
def test_rows_of_padding_are_no_gaps_to_imitate(consecutive):
    y = torch.randn(12, 3)
    y[8:], y[2:4, 0] = nan, nan
    folds = gap_folds(y, 2, consecutive=consecutive)
    assert torch.equal(folds[:, :8], gap_folds(y[:8], 2, consecutive=consecutive))
    assert torch.equal(folds.any(0).any(0), torch.tensor([True, False, False]))
    assert not folds[:, 8:].any()


@pytest.mark.parametrize("consecutive", [True, False])
def test_whole_rows_are_the_gaps_if_there_are_no_others(consecutive):
    y = torch.randn(12, 3)
    y[8:] = nan
    assert torch.equal(gap_folds(y, 2, consecutive=consecutive).sum(0), (~torch.isnan(y)).long())


def test_folds_need_gaps_and_rows(y):
    with pytest.raises(ValueError, match="expected data with gaps"):
        gap_folds(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="from 1 to 39 folds"):
        gap_folds(y, 40, consecutive=True)
    with pytest.raises(ValueError, match="from 1 to 40 folds"):
        gap_folds(y, 41)
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


def test_log_densities_are_those_of_the_entries_fold_after_fold(y):
    folds = gap_folds(y, 3)
    found = held_out_log_prob({"one": lambda shown: Normal(torch.arange(4.0), 1.0)}, y, folds, progress=False)
    expected = Normal(torch.arange(4.0), 1.0).log_prob(torch.nan_to_num(y))
    torch.testing.assert_close(found["one"], torch.cat([expected[fold] for fold in folds]))


def test_two_stacking_weights_are_the_best_on_a_grid():
    log_prob = {"wide": Normal(0.0, 2.0).log_prob(2.0 * torch.randn(50)), "narrow": Normal(0.0, 0.3).log_prob(torch.randn(50))}
    first, second = (values.double() for values in log_prob.values())
    grid = torch.linspace(0.0, 1.0, 10_001, dtype=torch.float64)
    means = torch.logaddexp(grid.log()[:, None] + first, (1.0 - grid).log()[:, None] + second).mean(1)
    weights = stacking_weights(log_prob, tolerance=1e-10)
    assert 0.05 < weights["wide"] < 0.95
    assert weights["wide"] == pytest.approx(grid[means.argmax()].item(), abs=1e-4)


def test_stacking_weights_of_weighted_entries_are_those_of_repeated_ones():
    log_prob = {"a": torch.randn(6).double(), "b": torch.randn(6).double()}
    number = torch.tensor([2, 0, 1, 3, 1, 0])
    repeated = {name: values.repeat_interleave(number) for name, values in log_prob.items()}
    assert stacking_weights(log_prob, weight=0.5 * number) == pytest.approx(stacking_weights(repeated), abs=1e-6)
    for wrong in (torch.ones(5), torch.zeros(6), -torch.ones(6)):
        with pytest.raises(ValueError, match="expected 6 weights of entries"):
            stacking_weights(log_prob, weight=wrong)


def test_stacking_ends_where_no_candidate_gains():
    """The conditions of Karush, Kuhn and Tucker: the gain is one for what has weight, and less for all else."""
    locs = {"a": 0.0, "b": 0.5, "c": 3.0, "d": -4.0}
    y = torch.cat([torch.randn(300), 3.0 + torch.randn(100)]).double()
    log_prob = {name: Normal(loc, 1.0).log_prob(y) for name, loc in locs.items()}
    weights = stacking_weights(log_prob, tolerance=1e-8)
    assert sum(weights.values()) == pytest.approx(1.0)
    mixture = torch.stack([log_prob[name] + math.log(weight) for name, weight in weights.items() if weight]).logsumexp(0)
    for name, values in log_prob.items():
        gain = (values - mixture).exp().mean().item()
        assert gain <= 1.0 + 1e-7
        assert abs(gain - 1.0) < 1e-4 or weights[name] < 1e-3
        assert mixture.mean() > values.mean() - 1e-8
    assert weights["c"] == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize("num_independent", [1.0, 5.0, 200.0])
def test_stacking_of_few_independent_entries_is_the_best_on_a_grid(num_independent):
    log_prob = {
        "first": Normal(0.0, 1.0).log_prob(torch.randn(50)),
        "second": Normal(0.0, 1.0).log_prob(torch.randn(50) - 4.0),
    }
    first, second = (values.double() for values in log_prob.values())
    grid = torch.linspace(0.0, 1.0, 10_001, dtype=torch.float64)
    merit = torch.logaddexp(grid.log()[:, None] + first, (1.0 - grid).log()[:, None] + second).mean(1)
    merit += 0.5 * (grid.log() + (1.0 - grid).log()) / num_independent
    weights = stacking_weights(log_prob, num_independent=num_independent, tolerance=1e-10)
    assert weights["first"] == pytest.approx(grid[merit.argmax()].item(), abs=1e-4)
    assert weights["first"] < stacking_weights(log_prob)["first"]


def test_stacking_without_independent_entries_is_refused():
    for number in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"expected a positive num_independent, got .*; count the gaps"):
            stacking_weights({"a": torch.zeros(2)}, num_independent=number)


def test_stacking_needs_the_same_entries_of_each():
    with pytest.raises(ValueError, match=r"the same entries from one candidate or more, got shapes {'a': \[2\], 'b': \[3\]}"):
        stacking_weights({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="one candidate or more"):
        stacking_weights({})
    impossible = torch.tensor([-1.0, -math.inf])
    assert stacking_weights({"a": impossible, "b": torch.tensor([-1.0, -2.0])})["b"] > 0.5
    for second in (-math.inf, math.nan):
        with pytest.raises(ValueError, match="finite density, none NaN, got 1 of 2"):
            stacking_weights({"a": impossible, "b": torch.tensor([-2.0, second])})
    with pytest.raises(ValueError, match="got 0 of 0"):
        stacking_weights({"a": torch.zeros(0)})


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


def test_predictions_without_densities_are_refused(y):
    with pytest.raises(TypeError, match=r"a prediction with log_prob from candidate 'mean', got Tensor; return the"):
        held_out_nll({"mean": lambda shown: shown.nanmean(0)}, y, gap_folds(y), progress=False)


def test_what_is_no_tensor_is_refused(y, unchecked):
    candidates = {"columns": lambda shown: Normal(shown.nanmean(0), 1.0)}
    folds = gap_folds(y)
    for use in (
        lambda: gap_folds(y.numpy()),
        lambda: held_out_nll(candidates, y.numpy(), folds),
        lambda: held_out_nll(candidates, y, folds.numpy()),
    ):
        with pytest.raises(TypeError, match=r"expected data to be tensors, got ndarray; use pyro_lvgp.tables.as_tensor"):
            use()


def test_whole_numbers_are_refused(y, unchecked):
    """Which take no NaN, and are no choice of entries."""
    candidates, folds = {"columns": lambda shown: Normal(shown.nanmean(0), 1.0)}, gap_folds(y)
    with pytest.raises(TypeError, match=r"expected data of a floating-point dtype, .* got torch\.int64; use y\.to"):
        held_out_nll(candidates, y.nan_to_num().long(), folds)
    with pytest.raises(TypeError, match=r"expected folds of booleans, .* got torch\.int64; use fold\.bool\(\)"):
        held_out_nll(candidates, y, folds.long())


def test_other_shapes_are_refused(y):
    with pytest.raises(ValueError, match=r"expected data \[rows, columns\], got \[2, \d+, \d+\]"):
        gap_folds(torch.stack([y, y]))
    with pytest.raises(ValueError, match="expected folds of the data's shape"):
        held_out_nll({}, y, [torch.isnan(y)[:, :1]])
    with pytest.raises(ValueError, match=r"expected log densities of shape .* from candidate 'sum'"):
        held_out_nll({"sum": lambda shown: Independent(Normal(torch.zeros_like(y), 1.0), 1)}, y, gap_folds(y), progress=False)
