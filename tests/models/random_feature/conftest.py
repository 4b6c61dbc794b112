"""Fixtures of the tests of this folder."""

import pytest
import torch

from tests.helpers.random_features import D, N


@pytest.fixture
def Y():
    return torch.randn(N, D)
