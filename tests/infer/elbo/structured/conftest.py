"""Fixtures of the tests of this folder."""

import pytest

from pyro_lvgp.distributions import StructuredPosterior


@pytest.fixture
def fixed_noise(monkeypatch):
    """Every draw of a marginal is one standard deviation above its mean: bounds can be compared draw by draw."""
    monkeypatch.setattr(StructuredPosterior, "rsample_marginals", lambda self: self.mean + self.variance.sqrt())
