"""Gaussian processes over one input as state-space models: O(N) work and memory in O(log N) parallel steps."""

from pyro_lvgp.ops.state_space._kalman import KalmanFilter
from pyro_lvgp.ops.state_space.inference import (
    Series,
    condition,
    log_normaliser,
    log_prob,
    sample_posterior,
    sample_prior,
    sort_inputs,
)
from pyro_lvgp.ops.state_space.joint import joint_log_normaliser
from pyro_lvgp.ops.state_space.models import StateSpaceModel, add, constant, cosine, matern, multiply, pad
from pyro_lvgp.ops.state_space.scan import Maps, prefix

__all__ = [
    "KalmanFilter",
    "Maps",
    "Series",
    "StateSpaceModel",
    "add",
    "condition",
    "constant",
    "cosine",
    "joint_log_normaliser",
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
