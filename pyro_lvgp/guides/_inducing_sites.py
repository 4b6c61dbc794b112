"""Gaussian sites of points on the whitened inducing values of sparse processes, from the encodings of their data."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.distributions.sparse_gaussian_process import SparseProcess
from pyro_lvgp.networks import NeighbourNet, OffsetNet
from pyro_lvgp.ops import sparse_sites
from pyro_lvgp.ops.sparse_sites import Sites

__all__ = ["PointSites", "aggregate", "by_series", "nearest", "product", "projected", "weight_of_points"]


class PointSites(NamedTuple):
    """Gaussian sites on linear functions of the whitened inducing values, with a dimension for the plate of the points.

    :param G: coefficients of the linear functions, one column for each.
    :param precision: precision of each site.
    :param information: precision times mean of each site.
    """

    G: Float[Tensor, "*#batch M R"]
    precision: Float[Tensor, "*#batch R"]
    information: Float[Tensor, "*#batch R"]


def projected(process: SparseProcess, encoding: tuple[Tensor, Tensor], y: Tensor, name: str) -> PointSites:
    """Project sites on f at the data on the inducing values."""
    loc, scale = (part.mT.unsqueeze(-3) for part in encoding)
    _check(name, process, loc, -2)
    return PointSites(process.A, *_natural(loc, scale.square(), weight_of_points(process, y)))


def nearest(process: SparseProcess, encoder: OffsetNet | NeighbourNet, y: Tensor, name: str) -> PointSites:
    """Sum over data sites on the inducing values nearest to each datum; a ``NeighbourNet`` gives them by sites on f."""
    index = sparse_sites.nearest(process.similarity, min(encoder.num_nearest, process.num_inducing))
    loc, scale = encoder(y[..., None, None, :, :], process.offsets(index))
    _check(name, process, loc, -1)
    loc, variance = _by_process(loc), _by_process(scale).square()
    gain, conditional_variance = variance.new_ones(()), variance.new_zeros(())
    if isinstance(encoder, NeighbourNet):
        gain, conditional_variance = process.given_single_value(index)
    precision, information = _natural(loc, variance + conditional_variance, weight_of_points(process, y)[..., None])
    natural = gain.square() * precision, gain * information
    return PointSites(process.L.mT, *(sparse_sites.sum_at(index, part, process.num_inducing) for part in natural))


def weight_of_points(process: SparseProcess, y: Tensor) -> Tensor:
    """Return the weight of each point, [*series, 1, 1, N]: N/B in a mini-batch, and zero without observed entries."""
    return ((~torch.isnan(y)).any(-1).to(y) * process.weight)[..., None, None, :]


def _natural(loc: Tensor, variance: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute precision and information of sites; both are zero where the weight is."""
    precision = torch.where(weight > 0.0, weight / variance, 0.0)
    return precision, precision * loc


def _by_process(x: Tensor) -> Tensor:
    """Convert encodings [*, q, N, T, Q] of offsets, q = Q or q = 1 if processes share their points, to [*, Q, N, T]."""
    if x.shape[-4] == 1:
        return x.transpose(-4, -1).squeeze(-1)
    return x.diagonal(dim1=-4, dim2=-1).movedim(-1, -3)


def _check(name: str, process: SparseProcess, loc: Tensor, dim: int) -> None:
    """Raise unless the dimension of an encoding has the size of the number of processes."""
    if loc.shape[dim] != process.num_latents:
        raise ValueError(
            f"expected sites of {process.num_latents} processes for {name!r}, got an encoding of {loc.shape[dim]}; encoders "
            "return loc and scale [..., latent dimensions]"
        )


def product(memory: Sites | None, new: Sites) -> Sites:
    """Multiply sites by adding natural parameters; a memory of one series broadcasts over all."""
    if memory is None:
        return new
    if memory.information.shape[:-2] not in ((), new.information.shape[:-2]):
        raise ValueError(
            f"expected the {len(memory.information)} series of the guide's memory, got {list(new.information.shape[:-2])}; "
            "pass all of them, with rows of NaN for series without new data"
        )
    return Sites(memory.precision + new.precision, memory.information + new.information)


def aggregate(point_sites: PointSites) -> Sites:
    """Return the product of the sites of all points, [*series, Q, M]."""
    return by_series(sparse_sites.aggregate(*point_sites))


def by_series(sites: Sites) -> Sites:
    """Remove the dimension of the plate of the points, to [*series, Q, M]."""
    return Sites(sites.precision.squeeze(-4), sites.information.squeeze(-3))
