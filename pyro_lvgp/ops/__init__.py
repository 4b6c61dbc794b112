"""Pure tensor functions: torch alone, without state, for any leading batch dimensions."""

__all__ = [
    "covariance",
    "expected_log_likelihood",
    "gaussian_sites",
    "linalg",
    "quadrature",
    "quasi_monte_carlo",
    "sparse_sites",
    "state_space",
]

from pyro_lvgp.ops import (
    covariance,
    expected_log_likelihood,
    gaussian_sites,
    linalg,
    quadrature,
    quasi_monte_carlo,
    sparse_sites,
    state_space,
)
