"""Pure tensor functions, which depend on torch alone and broadcast over leading batch dimensions."""

__all__ = [
    "covariance",
    "expected_log_likelihood",
    "gaussian_sites",
    "langevin",
    "linalg",
    "logistic",
    "low_rank",
    "ordered_probit",
    "quadrature",
    "quasi_monte_carlo",
    "rbf_score",
    "site_updates",
    "sparse_sites",
    "state_space",
    "student_t",
]

from pyro_lvgp.ops import (
    covariance,
    expected_log_likelihood,
    gaussian_sites,
    langevin,
    linalg,
    logistic,
    low_rank,
    ordered_probit,
    quadrature,
    quasi_monte_carlo,
    rbf_score,
    site_updates,
    sparse_sites,
    state_space,
    student_t,
)
