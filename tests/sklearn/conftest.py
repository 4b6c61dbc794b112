"""Estimators with few candidates, for tests of what does not depend on them."""

import pytest

from pyro_lvgp.sklearn import GPVAERegressor, gplvm_imputer


@pytest.fixture
def few_candidates(monkeypatch):
    """One of each kind: a model and a Gaussian of an imputer, and of a series a model with latents beside a regression."""
    of_table, of_series = gplvm_imputer.candidates, GPVAERegressor._candidates

    def first_of_each_kind(*args):
        return list({type(size): size for size in reversed(of_table(*args))}.values())

    def last(*args):
        return dict([list(of_series(*args).items())[-1]])

    monkeypatch.setattr(gplvm_imputer, "candidates", first_of_each_kind)
    monkeypatch.setattr(GPVAERegressor, "_candidates", last)
