"""Covariances between levels of a category: pure tensor functions that broadcast over leading batch dimensions."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["compound_symmetry", "coregionalisation", "take_levels"]


def take_levels(values: Float[Tensor, "*#batch L R"], levels: Int[Tensor, "*#batch N"]) -> Float[Tensor, "*batch N R"]:
    """Return the row of each point's level.

    :param values: one row for each of L levels.
    :param levels: levels of N points, from 0 to L − 1.

    >>> take_levels(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 2])).T
    tensor([[3., 1., 3.]])
    """
    batch = torch.broadcast_shapes(values.shape[:-2], levels.shape[:-1])
    index = levels[..., None].expand(*batch, levels.shape[-1], values.shape[-1])
    return values.expand(*batch, *values.shape[-2:]).gather(-2, index)


def compound_symmetry(
    x: Int[Tensor, "*#batch N"],
    z: Int[Tensor, "*#batch M"],
    correlation: Float[Tensor, "*#batch"],
    variance: Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch N M"]:
    """Covariance σ² of equal levels, and σ² ρ of different levels.

    :param x: levels of N points.
    :param z: levels of M points.
    :param correlation: ρ.
    :param variance: σ².

    Source: Rasmussen and Williams (2006), section 4.4.2, for discrete inputs; Roustant et al. (2020), "Group kernels for
    Gaussian process metamodels with categorical inputs", for the range of ρ.

    >>> compound_symmetry(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor(0.5), torch.tensor(2.0))
    tensor([[1.],
            [2.]])
    """
    same = x[..., :, None] == z[..., None, :]
    correlation, variance = correlation[..., None, None], variance[..., None, None]
    return variance * torch.where(same, torch.ones_like(correlation), correlation)


def coregionalisation(
    x: Int[Tensor, "*#batch N"],
    z: Int[Tensor, "*#batch M"],
    factor: Float[Tensor, "*#batch L R"],
    variance: Float[Tensor, "*#batch L"],
) -> Float[Tensor, "*batch N M"]:
    """Entries of W Wᵀ + diag(κ) at pairs of levels, without the matrix of all levels.

    :param x: levels of N points, from 0 to L − 1.
    :param z: levels of M points.
    :param factor: factor W of the covariance of levels.
    :param variance: κ.

    Source: Bonilla, Chai and Williams (2007), "Multi-task Gaussian process prediction"; Alvarez, Rosasco and Lawrence (2012),
    "Kernels for vector-valued functions: a review", section 4.2.

    >>> W, kappa = torch.tensor([[1.0], [2.0]]), torch.tensor([0.5, 0.25])
    >>> coregionalisation(torch.tensor([0, 1]), torch.tensor([0, 1]), W, kappa)
    tensor([[1.5000, 2.0000],
            [2.0000, 4.2500]])
    """
    own = take_levels(variance[..., None], x) * (x[..., :, None] == z[..., None, :])
    return take_levels(factor, x) @ take_levels(factor, z).mT + own
