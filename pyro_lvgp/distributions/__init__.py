"""Gaussian processes, predictive distributions, mixtures and normals as Pyro distributions."""

from pyro_lvgp._utils.cholesky import NotPositiveDefiniteError, safe_cholesky
from pyro_lvgp.distributions.diagonal_mixture import DiagonalMixture, assignment_logits
from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive, LikelihoodTerm, ObservedRows
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.distributions.normal import DrawnNormal, PrecisionNormal, PrecisionNormalAtMean, without_independent
from pyro_lvgp.distributions.path_delta import PathDelta
from pyro_lvgp.distributions.sparse_gaussian_process import InducingValues, SparseProcess, inducing_posterior
from pyro_lvgp.distributions.warped_normal import WarpedNormal, YeoJohnsonTransform

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
    "WarpedNormal",
    "YeoJohnsonTransform",
    "assignment_logits",
    "inducing_posterior",
    "safe_cholesky",
    "without_independent",
]
