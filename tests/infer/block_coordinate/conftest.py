"""Fixtures of the tests of this folder."""

import pyro
import pytest


@pytest.fixture(params=[False, True], ids=["param store", "local parameters"])
def _local(request):
    with pyro.settings.context(module_local_params=request.param):
        yield
