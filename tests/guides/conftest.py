"""Fixtures of tests of guides."""

import pytest
import torch

from pyro_lvgp.guides import structured


@pytest.fixture
def bounds(monkeypatch):
    """Bounds of the updates of each call of a guide."""
    found = []

    def recording(*args, **kwargs):
        updated, of_steps = update_sites(*args, **kwargs)
        found.append(torch.stack(of_steps))
        return updated, of_steps

    update_sites = structured.update_sites
    monkeypatch.setattr(structured, "update_sites", recording)
    return found
