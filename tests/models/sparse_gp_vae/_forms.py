"""Forms of the sites of a sparse GP-VAE."""

import pytest

from tests.helpers.sparse_processes import ENCODED

every_form = pytest.mark.parametrize("form", [*ENCODED, "free"])
