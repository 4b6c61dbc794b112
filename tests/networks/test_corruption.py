"""Maskings: what they hide, how often, and that they hide nothing else."""

import pytest
import torch

from pyro_lvgp.networks import mask_entries, mask_like_rows, mask_like_shifted

nan = torch.nan


def gaps(y):
    return torch.isnan(y)


@pytest.mark.parametrize("masking", [mask_entries(0.5), mask_like_rows, mask_like_shifted], ids=["entries", "rows", "shifted"])
@pytest.mark.parametrize("shape", [(30, 4), (3, 30, 4)])
def test_what_is_shown_is_as_it_was(masking, shape):
    y = torch.randn(shape, dtype=torch.float64)
    y[torch.rand(shape) < 0.3] = nan
    before = y.clone()
    hidden = masking(y)
    torch.testing.assert_close(y, before, equal_nan=True)
    assert gaps(hidden)[gaps(y)].all()
    torch.testing.assert_close(hidden[~gaps(hidden)], y[~gaps(hidden)])
    assert gaps(hidden).sum() > gaps(y).sum()


@pytest.mark.parametrize("masking", [mask_like_rows, mask_like_shifted])
def test_padding_is_no_gap(masking):
    y = torch.zeros(3, 10, 2)
    for series, length in zip(y, (10, 6, 1), strict=True):
        series[length:] = nan
    for _ in range(20):
        assert torch.equal(gaps(masking(y)), gaps(y))


def test_each_entry_is_hidden_with_the_same_probability():
    masking, y = mask_entries(0.3), torch.zeros(200, 50)
    first, second = gaps(masking(y)), gaps(masking(y))
    for hidden, chance in ((first, 0.3), (second, 0.3), (first & second, 0.09)):
        assert hidden.double().mean() == pytest.approx(chance, abs=4.5 * (chance * (1.0 - chance) / y.numel()) ** 0.5)


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_fractions_out_of_range(fraction):
    with pytest.raises(ValueError, match=f"expected a fraction from 0 to 1, got {fraction}"):
        mask_entries(fraction)


def test_rows_take_the_gaps_of_rows_of_their_own_series():
    patterns = torch.tensor([[True, False, False], [False, False, True], [False, False, False]])
    own = [[0, 2, 2, 2], [1, 1, 2, 2]]  # of each series
    y = torch.zeros(2, 4, 3).masked_fill(patterns[torch.tensor(own)], nan)
    complete = torch.zeros(2)
    for _ in range(500):
        hidden = gaps(mask_like_rows(y))
        for series, pattern in enumerate(patterns[:2]):
            assert ((hidden[series] == pattern) | ~hidden[series]).all()
        complete += (~hidden[:, -1].any(-1)).float()
    # A row that misses nothing stays so if it meets another such: three in four, two in four.
    for times, chance in zip(complete, (0.75, 0.5), strict=True):
        assert times == pytest.approx(500 * chance, abs=4.5 * (500 * chance * (1.0 - chance)) ** 0.5)


def test_shifted_gaps_keep_their_blocks():
    y = torch.zeros(10, 2)
    y[3:7, 0] = nan
    met = set()
    for _ in range(200):
        added = gaps(mask_like_shifted(y))[:, 0] & ~gaps(y)[:, 0]
        shifts = [shift for shift in range(10) if torch.equal(gaps(y)[:, 0].roll(shift) & ~gaps(y)[:, 0], added)]
        assert len(shifts) == 1
        met.update(shifts)
        assert not gaps(mask_like_shifted(y))[:, 1].any()
    assert met == set(range(10))
