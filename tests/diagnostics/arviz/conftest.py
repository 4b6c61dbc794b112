"""Fixtures of the tests of this folder."""

import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.diagnostics import to_arviz
from tests.diagnostics.arviz._models import Masked


@pytest.fixture(params=["entries", "rows", "handler"])
def incomplete(request):
    y = torch.randn(6, 3)
    y[1, 2] = y[4, 0] = torch.nan
    if request.param != "entries":
        y[[1, 4]] = torch.nan
    model = Masked(request.param)
    return y, to_arviz(model, AutoNormal(model), y, num_samples=300, seed=0)
