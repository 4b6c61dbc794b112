"""Shape checks, and a clean param store and seed for every test."""

import gc

import jaxtyping

from tests.helpers import shape_checks

shape_checks.install("pyro_lvgp")

import pyro  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_collection_finish():
    """Leave the objects of imported modules out of garbage collections, each of which would take a second; collect rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def _clean_pyro():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def float64():
    """Double precision where nothing else is said."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    """Both precisions."""
    return request.param


@pytest.fixture
def local_params():
    """Parameters in their modules, not in Pyro's store."""
    with pyro.settings.context(module_local_params=True):
        yield


@pytest.fixture
def unchecked():
    """Without the shape checks, so that bad input reaches the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
