"""Lengthscale of random features that the log density of the data prefers at given latents, and likelihoods of counts."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.seeding import normal_draws
from pyro_lvgp.conjugate.feature_regression import profile_log_density
from pyro_lvgp.kernels.spectral import random_features
from pyro_lvgp.likelihoods import Gaussian, Likelihood, NegativeBinomial


def default_lengthscale(latent_dim: int) -> float:
    """Return √(Q/8), 0.5 for two latent dimensions."""
    return (latent_dim / 8.0) ** 0.5


def candidate_lengthscales(latent_dim: int) -> list[float]:
    """Return the default lengthscale times 2, √2, 1, …, 1/8."""
    return [default_lengthscale(latent_dim) * 2.0 ** (0.5 * power) for power in range(2, -7, -1)]


def log_densities_of_lengthscales(
    X: Float[Tensor, "N Q"], Y: Float[Tensor, "N D"], lengthscales: list[float], num_frequencies: int, *, seed: int
) -> Float[Tensor, " K"]:
    """Log density of the data at latents X, under features of frequencies from N(0, (2πℓ)⁻²), for each lengthscale ℓ.

    The kernel variance and the noise variance are optimal for each.  All lengthscales have the same draws of frequencies, but
    for their scale.

    :param X: latents.
    :param Y: values of the functions with noise, without missing entries.
    :param lengthscales: lengthscales ℓ.
    :param num_frequencies: number of frequencies.
    :param seed: seed of the draws of frequencies.
    """
    X, centred = X.double(), (Y - Y.mean(0)).double()
    draws = normal_draws(num_frequencies, X.shape[1], seed=seed, like=X)
    features = (random_features(X, draws / (2.0 * math.pi * lengthscale)) for lengthscale in lengthscales)
    return torch.stack([profile_log_density(each, centred)[0] for each in features])


def best_lengthscale(X: Float[Tensor, "N Q"], Y: Float[Tensor, "N D"], num_frequencies: int, *, seed: int) -> float:
    """Return the candidate of the highest log density; the default for data that do not vary."""
    lengthscales = candidate_lengthscales(X.shape[1])
    if not (Y - Y.mean(0)).any():
        return default_lengthscale(X.shape[1])
    return lengthscales[int(log_densities_of_lengthscales(X, Y, lengthscales, num_frequencies, seed=seed).argmax())]


def likelihood_of(Y: Float[Tensor, "N D"]) -> Likelihood:
    """Return a negative binomial likelihood for counts, whole numbers from 0 that exceed 1 somewhere, and else a Gaussian."""
    values = Y[~Y.isnan()]
    is_count = bool(((values >= 0.0) & (values == values.round())).all()) and bool((values > 1.0).any())
    return NegativeBinomial(data_dim=Y.shape[1]) if is_count else Gaussian()
