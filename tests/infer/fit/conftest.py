"""Fixtures of the tests of this folder."""

import pytest
import torch

from tests.infer.fit._models import D, N


@pytest.fixture
def Y():
    Y = torch.randn(N, 2) @ torch.randn(2, D) + 0.1 * torch.randn(N, D)
    Y[3, 1] = torch.nan
    return Y
