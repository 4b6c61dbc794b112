"""Fixtures of the tests of this folder."""

import pytest

from tests.kernels._kernels import KERNELS


@pytest.fixture(params=KERNELS)
def make(request):
    return KERNELS[request.param]
