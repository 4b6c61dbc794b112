import pytest
import torch

from pyro_lvgp.diagnostics import shifted_folds


def test_each_fold_has_the_gaps_at_another_place():
    y = torch.zeros(12, 2)
    y[2:4, 0] = torch.nan
    y[8, 1] = torch.nan
    folds = shifted_folds(y, 3)
    for fold, shift in zip(folds, (3, 6, 9), strict=True):
        assert torch.equal(fold, y.isnan().roll(shift, 0) & ~y.isnan())
        assert fold.any()


def test_missing_entries_are_not_hidden_again():
    y = torch.zeros(10, 1)
    y[7:] = torch.nan
    assert not (shifted_folds(y, 1) & y.isnan()).any()


def test_data_without_gaps_lose_a_tenth_of_the_rows():
    folds = shifted_folds(torch.zeros(20, 3), 3)
    assert folds.sum((1, 2)).tolist() == [6, 6, 6]
    assert folds.all(-1).any(-1).all()


def test_outputs_that_would_lose_all_entries_are_not_hidden():
    y = torch.zeros(12, 2)
    y[1:, 0] = torch.nan
    y[2:4, 1] = torch.nan
    folds = shifted_folds(y, 3)
    assert not folds[..., 0].any()
    assert torch.equal(folds[..., 1], shifted_folds(y[:, 1:], 3)[..., 0])


@pytest.mark.parametrize(
    ("y", "num_folds", "message"),
    [
        (torch.zeros(5), 1, "expected data \\[rows, columns\\]"),
        (torch.zeros(5, 1), 5, "more rows than folds"),
        (torch.zeros(5, 1), 0, "more rows than folds"),
        (torch.tensor([[0.0], [torch.nan], [0.0], [torch.nan]]), 3, "hide all of outputs"),
    ],
)
def test_bad_data_raise(y, num_folds, message):
    with pytest.raises(ValueError, match=message):
        shifted_folds(y, num_folds)
