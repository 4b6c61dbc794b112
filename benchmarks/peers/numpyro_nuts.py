"""NUTS of NumPyro on models written with pyroapi, in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from pyroapi import pyro_backend


@contextmanager
def numpyro_backend() -> Iterator[None]:
    """Context in which models written with pyroapi are NumPyro models, in float64."""
    # numpyro.compat is incomplete: it has no deterministic sites, and its zeros are ones.
    backend = {"pyro": "numpyro", "distributions": "numpyro.distributions", "ops": "jax.numpy", "handlers": "numpyro.handlers"}
    with jax.enable_x64(True), pyro_backend(**backend):
        yield


def nuts(
    model: Callable[..., Any], data: tuple[np.ndarray, ...], *, num_warmup: int, num_samples: int, num_chains: int, seed: int
) -> dict[str, np.ndarray]:
    """Draw from the posterior by NUTS, with NumPyro's defaults, one chain after the other.

    :param model: model written with pyroapi.
    :param data: arguments of the model.
    :param num_warmup: transitions of each chain that adapt the step size and the mass matrix.
    :param num_samples: draws of each chain.
    :param num_chains: number of chains.
    :param seed: seed of all chains.
    :returns: values of all sites, [chains, draws, ...], on their support.
    """
    with numpyro_backend():
        mcmc = MCMC(
            NUTS(model),
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            chain_method="sequential",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(seed), *map(jnp.asarray, data))
        draws = mcmc.get_samples(group_by_chain=True)
        return {name: np.array(value) for name, value in draws.items()}


def log_joint(model: Callable[..., Any], data: tuple[np.ndarray, ...], latents: dict[str, np.ndarray]) -> float:
    """Compute the log joint density of latents and data by NumPyro.

    :param model: model written with pyroapi.
    :param data: arguments of the model.
    :param latents: values of all latent sites, on their support.
    """
    with numpyro_backend():
        # One compilation is much faster than one for each operation.
        density = jax.jit(lambda args, values: log_density(model, args, {}, values)[0])
        return float(density(tuple(map(jnp.asarray, data)), jax.tree.map(jnp.asarray, latents)))
