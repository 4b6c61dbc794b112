r"""Closed-form coordinate updates of mean-field families: pure tensor functions.

Each returns the factor :math:`q` that maximises the bound for fixed other factors.  Updates are sums of statistics of the
data: for a mini-batch multiply its responsibilities, weights or precisions by N/B.

All parameters are affine in the natural parameters of their family.  A step :math:`(1 - \rho) \lambda + \rho \hat\lambda` from
a factor to its update is therefore a natural-gradient step of length ρ, which does not decrease the bound.

Source: Blei and Jordan (2006), "Variational inference for Dirichlet process mixtures"; Bishop (2006), chapter 10; Hoffman et
al. (2013), "Stochastic variational inference", for damping.
"""

from pyro_lvgp.conjugate.components import (
    NormalInverseWishart,
    normal_inverse_wishart,
    normal_inverse_wishart_kl,
    normal_log_likelihood,
)
from pyro_lvgp.conjugate.regression import NaturalGaussian, gamma_precision, gaussian_weights
from pyro_lvgp.conjugate.weights import (
    categorical_assignments,
    concentration,
    dirichlet_log_weights,
    dirichlet_weights,
    stick_breaking,
    stick_log_weights,
)

__all__ = [
    "NaturalGaussian",
    "NormalInverseWishart",
    "categorical_assignments",
    "concentration",
    "dirichlet_log_weights",
    "dirichlet_weights",
    "gamma_precision",
    "gaussian_weights",
    "normal_inverse_wishart",
    "normal_inverse_wishart_kl",
    "normal_log_likelihood",
    "stick_breaking",
    "stick_log_weights",
]
