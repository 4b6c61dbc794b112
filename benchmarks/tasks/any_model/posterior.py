"""Posterior means and standard deviations in unconstrained space, and distances between them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from pyro import poutine
from pyro.distributions.transforms import biject_to
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from benchmarks.tasks.any_model.problem import Problem


@dataclass(frozen=True)
class Moments:
    """Means and standard deviations of all latent coordinates, with Monte Carlo standard errors.

    :param log_stddev: logarithms of the standard deviations.
    :param mean_error: standard errors of the means, in standard deviations.
    :param log_stddev_error: standard errors of the logarithms.
    :param rhat: largest split R-hat of the coordinates.
    """

    mean: Float[np.ndarray, " P"]
    log_stddev: Float[np.ndarray, " P"]
    mean_error: Float[np.ndarray, " P"]
    log_stddev_error: Float[np.ndarray, " P"]
    rhat: float

    @classmethod
    def of(cls, draws: Float[np.ndarray, "chains draws P"]) -> "Moments":
        """Estimate the moments from chains, whose autocorrelation the errors account for.

        With z = (x - mean) / stddev, the error of log stddev is that of the mean of z² / 2, to first order.
        """
        mean, stddev = draws.mean((0, 1)), draws.std((0, 1))
        squares = ((draws - mean) / stddev) ** 2
        errors = 0.5 * squares.std((0, 1)) / np.sqrt(effective_size(squares))
        rhat = float(split_gelman_rubin(draws).max())
        return cls(mean, np.log(stddev), effective_size(draws) ** -0.5, errors, rhat)


@dataclass(frozen=True)
class Distance:
    """Root mean squares over coordinates of differences from a reference, with those of the Monte Carlo errors.

    :param means: of the differences of means, in standard deviations of the reference.
    :param log_stddevs: of the differences of the logarithms of standard deviations.
    :param means_error: Monte Carlo error of ``means``, that of the reference included.
    :param log_stddevs_error: Monte Carlo error of ``log_stddevs``, that of the reference included.
    """

    means: float
    log_stddevs: float
    means_error: float
    log_stddevs_error: float

    @classmethod
    def between(cls, moments: Moments, reference: Moments) -> "Distance":
        """Compare moments with those of a reference."""
        scale = np.exp(reference.log_stddev)
        relative = np.exp(moments.log_stddev - reference.log_stddev)
        return cls(
            root_mean_square((moments.mean - reference.mean) / scale),
            root_mean_square(moments.log_stddev - reference.log_stddev),
            root_mean_square(np.hypot(relative * moments.mean_error, reference.mean_error)),
            root_mean_square(np.hypot(moments.log_stddev_error, reference.log_stddev_error)),
        )


def effective_size(draws: Float[np.ndarray, "chains draws P"]) -> Float[np.ndarray, " P"]:
    """Estimate effective sample sizes; at least one, because the estimate of short chains may be negative."""
    return np.maximum(effective_sample_size(draws), 1.0)


def root_mean_square(x: Float[np.ndarray, " P"]) -> float:
    """Compute the root mean square."""
    return float(np.sqrt(np.mean(x**2)))


def unconstrained(
    problem: Problem, draws: Mapping[str, Float[Tensor, "chains draws ..."]]
) -> Float[np.ndarray, "chains draws P"]:
    """Transform draws of all latent sites by the inverse of Pyro's ``biject_to(support)``, and concatenate the coordinates."""
    trace = prune_subsample_sites(poutine.trace(problem.model).get_trace(*problem.tensors))
    return np.concatenate(list(_coordinates(trace.iter_stochastic_nodes(), draws)), -1)


def _coordinates(sites: Iterable, draws: Mapping[str, Tensor]) -> Iterable[np.ndarray]:
    for name, site in sites:
        value = biject_to(site["fn"].support).inv(draws[name])
        yield value.reshape(*value.shape[:2], -1).numpy(force=True)
