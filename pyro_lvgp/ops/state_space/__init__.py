"""Gaussian processes over one input as Gauss–Markov chains: work and memory linear in the number of points, in log N steps."""

from pyro_lvgp.ops.state_space.inference import (
    KalmanFilter,
    Series,
    condition,
    log_normaliser,
    log_prob,
    sample_posterior,
    sample_prior,
    sort_inputs,
)
from pyro_lvgp.ops.state_space.models import StateSpaceModel, add, constant, matern, multiply, pad
from pyro_lvgp.ops.state_space.scan import prefix

__all__ = [
    "KalmanFilter",
    "Series",
    "StateSpaceModel",
    "add",
    "condition",
    "constant",
    "log_normaliser",
    "log_prob",
    "matern",
    "multiply",
    "pad",
    "prefix",
    "sample_posterior",
    "sample_prior",
    "sort_inputs",
]
