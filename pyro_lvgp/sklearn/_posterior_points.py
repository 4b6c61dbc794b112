"""Points of the posterior of the latents of rows, which do not depend on the other rows."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp._utils.seeding import normal_draws


def posterior_points(q: Any, number: int) -> Float[Tensor, "S B Q"]:
    """Stratified points of the distribution of each row's latents, which do not depend on the other rows.

    :param q: a Gaussian for each row, or a mixture of Gaussians.
    :param number: number S of points; each component has a share of them that is its weight, up to rounding.
    """
    if isinstance(q, torch.distributions.MixtureSameFamily):
        weights = q.mixture_distribution.probs
        parts: Any = q.component_distribution
        loc, scale_tril = parts.loc, parts.scale_tril
    else:
        loc, scale_tril = q.loc[:, None], q.scale_tril[:, None]
        weights = torch.ones_like(loc[..., 0])
    chosen = stratified(weights, number)
    noise = normal_draws(number, loc.shape[-1], seed=0, like=loc)
    steps = torch.einsum("bsij,sj->bsi", scale_tril.take_along_dim(chosen[..., None, None], 1), noise)
    return (loc.take_along_dim(chosen[..., None], 1) + steps).transpose(0, 1)


def stratified(weights: Float[Tensor, "B K"], number: int) -> Int[Tensor, "B S"]:
    """Return components of points of equal weight, in each row as many as the weight of a component, up to rounding.

    :param weights: weights of the components, of sum 1.
    :param number: number S of points.

    >>> stratified(torch.tensor([[0.25, 0.75]]), 4)
    tensor([[0, 1, 1, 1]])
    """
    ranks = ((torch.arange(number, dtype=weights.dtype) + 0.5) / number).expand(len(weights), -1)
    return torch.searchsorted(weights.cumsum(-1), ranks.contiguous()).clamp_max(weights.shape[-1] - 1)
