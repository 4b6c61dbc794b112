"""Pure tensor functions, which depend on torch alone and broadcast over leading batch dimensions."""

__all__ = [
    "covariance",
    "expected_log_likelihood",
    "gaussian_sites",
    "linalg",
    "logistic",
    "low_rank",
    "quadrature",
    "quasi_monte_carlo",
    "site_updates",
    "sparse_sites",
    "state_space",
]

from pyro_lvgp.ops import (
    covariance,
    expected_log_likelihood,
    gaussian_sites,
    linalg,
    logistic,
    low_rank,
    quadrature,
    quasi_monte_carlo,
    site_updates,
    sparse_sites,
    state_space,
)
