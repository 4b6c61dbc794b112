"""Likelihoods by name."""

import re
from typing import get_args

import numpy as np
import pytest
import torch

from pyro_lvgp.likelihoods import Binomial, LikelihoodName, Ordinal, likelihood_by_name
from pyro_lvgp.models import BayesianGPLVM, MultiViewGPLVM, RandomFeatureLVM
from pyro_lvgp.sklearn import GPLVM

CLASSES = {
    "bernoulli": "Bernoulli",
    "gaussian": "Gaussian",
    "log_normal": "LogNormal",
    "negative_binomial": "NegativeBinomial",
    "ordinal": "Ordinal",
    "poisson": "Poisson",
    "student_t": "StudentT",
}


def zeros_and_ones():
    return (torch.arange(24).view(8, 3) % 5 < 2).float()


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_are_those_of_columns(name):
    likelihood = likelihood_by_name(name, zeros_and_ones())
    assert type(likelihood).__name__ == CLASSES[name]
    assert likelihood.params() is None or likelihood.params().shape == (3,)


def test_names_are_those_of_the_type():
    assert set(get_args(LikelihoodName)) == set(CLASSES)


def test_levels_are_those_of_the_data():
    Y = zeros_and_ones()
    torch.testing.assert_close(likelihood_by_name("ordinal", Y).edges, Ordinal.from_data(Y).edges)


def test_objects_are_returned_and_other_names_refused(unchecked):
    likelihood = Binomial(3)
    assert likelihood_by_name(likelihood, zeros_and_ones()) is likelihood
    with pytest.raises(
        ValueError, match=re.escape("expected likelihood in ('bernoulli', ") + r".*got 'binomial'; for others pass"
    ):
        likelihood_by_name("binomial", zeros_and_ones())


def test_models_and_estimators_take_names():
    Y = zeros_and_ones()
    for model in (BayesianGPLVM, RandomFeatureLVM):
        assert type(model.from_data(Y, 1, likelihood="bernoulli").likelihood).__name__ == "Bernoulli"
    views = MultiViewGPLVM.from_data({"a": Y, "b": Y + torch.rand(8, 3)}, 1, likelihood={"a": "poisson"})
    assert [type(views.likelihood_of(view)).__name__ for view in "ab"] == ["Poisson", "Gaussian"]
    with pytest.raises(ValueError, match=r"likelihood.*'c'"):
        MultiViewGPLVM.from_data({"a": Y}, 1, likelihood={"c": "poisson"})
    gplvm = GPLVM(1, likelihood="bernoulli", max_iter=2, random_state=0).fit(Y.numpy())
    assert gplvm.likelihood == "bernoulli"  # as scikit-learn's clone needs it
    assert np.isfinite(gplvm.embedding_).all()
