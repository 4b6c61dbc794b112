"""Likelihoods p(y | f): how an observation scatters around a Gaussian-process function."""

from pyro_lvgp.likelihoods.base import Likelihood
from pyro_lvgp.likelihoods.continuous import Gaussian, LogNormal, StudentT, as_likelihood
from pyro_lvgp.likelihoods.counts import Bernoulli, Binomial, Logistic, NegativeBinomial, Poisson
from pyro_lvgp.likelihoods.heterogeneous import Heterogeneous
from pyro_lvgp.likelihoods.ordinal import Ordinal

__all__ = [
    "Bernoulli",
    "Binomial",
    "Gaussian",
    "Heterogeneous",
    "Likelihood",
    "LogNormal",
    "Logistic",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "StudentT",
    "as_likelihood",
]
