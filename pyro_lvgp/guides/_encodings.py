"""Encodings of Gaussian sites, and the priors that they multiply."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_lvgp.distributions.gaussian_process import GaussianProcess
from pyro_lvgp.distributions.normal import without_independent

__all__ = ["align_encoding", "check_layout", "gaussian_prior"]


def gaussian_prior(name: str, prior: Any) -> Any:
    """Return the prior of one latent dimension, without ``Independent``."""
    prior = without_independent(prior)
    if not isinstance(prior, GaussianProcess | MultivariateNormal | torch.distributions.Normal):
        raise ValueError(
            f"expected a GaussianProcess, MultivariateNormal or Normal prior at site {name!r}, got {type(prior).__name__}; "
            "leave the site out of encoders to give it a mean-field Gaussian"
        )
    return prior


def check_layout(name: str, shape: torch.Size, y: Tensor) -> None:
    """Raise if the shape of a process and that of the data do not match."""
    if y.dim() < 2:
        raise ValueError(f"expected data [..., points, outputs], got {list(y.shape)}; a single output needs [:, None]")
    if len(shape) == y.dim() - 1 and shape[:-1] != y.shape[:-2] and shape[:-1].numel() > 1:
        raise ValueError(
            f"expected site {name!r} to be one process of all series, [points], or processes of each, [series, latent "
            f"dimensions, points], for data of shape {list(y.shape)}, got {list(shape)}; "
            "give each process that the series share a site of its own"
        )


def align_encoding(x: Tensor, shape: torch.Size, name: str, has_latent_dim: bool) -> Tensor:
    """Reshape an encoding to the layout of a site, with dimensions of size 1 where the plates of the site have them."""
    event_dim = 2 if has_latent_dim else 1
    laid_out = x if has_latent_dim else x.flatten(-2)
    lead, result = list(laid_out.shape[:-event_dim]), list(laid_out.shape[-event_dim:])
    for size in reversed(shape[: len(shape) - event_dim]):
        result.insert(0, lead.pop() if lead and lead[-1] == size else 1)
    if lead or len(result) != len(shape) or any(size not in (1, whole) for size, whole in zip(result, shape, strict=True)):
        raise ValueError(
            f"expected an encoding that lines up with site {name!r} of shape {list(shape)} [..., latent dimensions, points], "
            f"got {list(x.shape)}; encoders return loc and scale [..., points, latent dimensions]"
        )
    return laid_out.reshape(result)
