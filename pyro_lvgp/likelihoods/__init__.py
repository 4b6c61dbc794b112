"""Likelihoods p(y | f) of an observation given the value of a Gaussian process."""

from pyro_lvgp.likelihoods.base import Likelihood, LogConcaveLikelihood
from pyro_lvgp.likelihoods.by_name import LikelihoodName, likelihood_by_name
from pyro_lvgp.likelihoods.continuous import Gaussian, LogNormal, StudentT, as_likelihood
from pyro_lvgp.likelihoods.counts import Bernoulli, Binomial, Logistic, NegativeBinomial, Poisson
from pyro_lvgp.likelihoods.heterogeneous import Heterogeneous
from pyro_lvgp.likelihoods.low_rank import LowRankGaussian
from pyro_lvgp.likelihoods.ordinal import Ordinal
from pyro_lvgp.likelihoods.rows import RowLikelihood

__all__ = [
    "Bernoulli",
    "Binomial",
    "Gaussian",
    "Heterogeneous",
    "Likelihood",
    "LikelihoodName",
    "LogConcaveLikelihood",
    "LogNormal",
    "Logistic",
    "LowRankGaussian",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "RowLikelihood",
    "StudentT",
    "as_likelihood",
    "likelihood_by_name",
]
