"""Observed entries that are moved to the first rows."""

import pytest
import torch

from pyro_lvgp.models._packing import Packing


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9, 1.0])
def test_entries_come_back_where_they_were(share):
    x, observed = torch.randn(20, 6), torch.rand(20, 6) >= share
    packing = Packing.of(observed)
    packed = packing.pack(x)
    assert len(packed) == max(observed.sum(0).max(), 1)
    torch.testing.assert_close(packing.unpack(packed), torch.where(observed, x, 0.0), rtol=0.0, atol=0.0)
    for column, seen, values in zip(packed.mT, observed.mT, x.mT, strict=True):
        torch.testing.assert_close(column[: seen.sum()], values[seen], rtol=0.0, atol=0.0)


def test_columns_and_batch_dimensions_broadcast():
    observed = torch.rand(20, 6) < 0.5
    packing, x = Packing.of(observed), torch.randn(3, 20, 1)
    packed = packing.pack(x)
    assert packed.shape == (3, observed.sum(0).max(), 6)
    torch.testing.assert_close(packed[1], packing.pack(x[1].expand(20, 6)), rtol=0.0, atol=0.0)
