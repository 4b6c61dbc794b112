"""Gaussian processes and other distributions that Pyro lacks."""

from pyro_lvgp._utils.cholesky import NotPositiveDefiniteError, safe_cholesky
from pyro_lvgp.distributions.diagonal_mixture import DiagonalMixture
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm, ObservedRows
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.distributions.normal import DrawnNormal, PrecisionNormal, PrecisionNormalAtMean, without_independent
from pyro_lvgp.distributions.path_delta import PathDelta
from pyro_lvgp.distributions.sparse_gaussian_process import InducingValues, SparseProcess, inducing_posterior

__all__ = [
    "DiagonalMixture",
    "DrawnNormal",
    "GaussianProcess",
    "InducingValues",
    "LikelihoodPredictive",
    "LikelihoodTerm",
    "NotPositiveDefiniteError",
    "ObservedRows",
    "PathDelta",
    "PrecisionNormal",
    "PrecisionNormalAtMean",
    "SparseProcess",
    "StateSpacePosterior",
    "StructuredPosterior",
    "inducing_posterior",
    "safe_cholesky",
    "without_independent",
]
