"""Gaussian processes over one input as Gauss–Markov chains: work and memory linear in the number of points, in log N steps."""

from pyro_lvgp.ops.state_space.inference import (
    KalmanFilter,
    Series,
    condition,
    draw,
    draw_prior,
    in_order,
    log_normaliser,
    log_prob,
)
from pyro_lvgp.ops.state_space.models import Chain, add, constant, matern, multiply, pad
from pyro_lvgp.ops.state_space.scan import prefix

__all__ = [
    "Chain",
    "KalmanFilter",
    "Series",
    "add",
    "condition",
    "constant",
    "draw",
    "draw_prior",
    "in_order",
    "log_normaliser",
    "log_prob",
    "matern",
    "multiply",
    "pad",
    "prefix",
]
