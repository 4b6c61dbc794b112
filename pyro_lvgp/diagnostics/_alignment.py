"""Alignment of the latents of several fits of a model that is invariant under transformations of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray
from jaxtyping import Float
from scipy.linalg import orthogonal_procrustes
from scipy.optimize import linear_sum_assignment

from pyro_lvgp.infer.protocols import HasLatentSymmetry, LatentSymmetry

__all__ = ["align", "closest_transformation"]

_ALIGNMENT, _MATRICES = "alignment", "alignment_matrices"


def closest_transformation(
    X: Float[np.ndarray, "N Q"], target: Float[np.ndarray, "N Q"], group: str
) -> Float[np.ndarray, "Q Q"]:
    r"""Compute the matrix R of a group that minimises :math:`\lVert X R - T \rVert_F`.

    Its elements are orthogonal, so that R maximises tr(Rᵀ Xᵀ T).  The best rotation or reflection is the polar factor of XᵀT,
    and the best signed permutation an assignment with values :math:`|(X^T T)_{ij}|`.

    :param X: points.
    :param target: T, their places after the transformation.
    :param group: ``"rotations"``, ``"signed permutations"`` or ``"signs"``.

    Source: Schönemann (1966), "A generalized solution of the orthogonal Procrustes problem"; Kuhn (1955), "The Hungarian
    method for the assignment problem".

    >>> X = np.array([[1.0, 0.0], [0.0, 2.0]])
    >>> closest_transformation(X, -X[:, ::-1], "signed permutations")
    array([[ 0., -1.],
           [-1.,  0.]])
    """
    if group == "rotations":
        return orthogonal_procrustes(X, target)[0]
    products = X.T @ target
    rows = columns = np.arange(len(products))
    if group == "signed permutations":
        rows, columns = linear_sum_assignment(np.abs(products), maximize=True)
    matrix = np.zeros_like(products)
    matrix[rows, columns] = np.where(products[rows, columns] < 0.0, -1.0, 1.0)
    return matrix


def align(models: Sequence[Callable[..., Any]], trees: Sequence[xarray.DataTree]) -> dict[str, Any]:
    """Transform the latents of all trees but the first so that their means are close to those of the first, in place.

    :param models: models of the trees.
    :param trees: trees with the group ``posterior``.
    :returns: attributes that say what was done: ``alignment``, and, if there was one, ``alignment_matrices``, for each site of
        latents the matrix R of each tree as JSON, with aligned latents x R.
    """
    symmetries = [model.latent_symmetry() if isinstance(model, HasLatentSymmetry) else None for model in models]
    first = symmetries[0]
    if len(trees) == 1:
        return {_ALIGNMENT: "none: there is one fit"}
    if first is None or any(symmetry != first for symmetry in symmetries):
        return {_ALIGNMENT: "none: the models do not declare one latent_symmetry()"}
    texts, matrices = [], {}
    for symmetry in (first, *first.further):
        sites = [name for name in (*symmetry.vectors, *symmetry.scales) if name in trees[0]["posterior"].data_vars]
        if symmetry.group != "none" and (latents := next((name for name in symmetry.vectors if name in sites), None)):
            texts.append(f"{symmetry.group} of {', '.join(sites)}")
            matrices[latents] = [matrix.tolist() for matrix in _align_sites(symmetry, latents, sites, trees)]
    if not texts:
        return {_ALIGNMENT: "none: the model has no symmetry of its latents that is known"}
    return {_ALIGNMENT: f"{' and '.join(texts)}, to the chain 0", _MATRICES: json.dumps(matrices)}


def _align_sites(
    symmetry: LatentSymmetry, latents: str, sites: Sequence[str], trees: Sequence[xarray.DataTree]
) -> list[Float[np.ndarray, "Q Q"]]:
    """Transform the sites of one symmetry, in place, and return the matrix of each tree.

    :param symmetry: the symmetry.
    :param latents: site by whose means the matrices are chosen.
    :param sites: sites of the symmetry in the trees.
    :param trees: trees with the group ``posterior``.
    """
    axis = symmetry.vectors[latents]
    posteriors = [tree["posterior"].to_dataset() for tree in trees]
    means = [_as_rows(posterior[latents].mean(("chain", "draw")).values, axis).astype(np.float64) for posterior in posteriors]
    matrices = [np.eye(means[0].shape[-1]), *(closest_transformation(mean, means[0], symmetry.group) for mean in means[1:])]
    for tree, posterior, matrix in zip(trees[1:], posteriors[1:], matrices[1:], strict=True):
        parts = ((symmetry.vectors, matrix), (symmetry.scales, np.abs(matrix)))
        transformed = {
            name: _transform(posterior[name], own, axes[name]) for axes, own in parts for name in sites if name in axes
        }
        tree["posterior"].dataset = posterior.assign(transformed)
    return matrices


def _as_rows(value: np.ndarray, axis: int) -> Float[np.ndarray, "N Q"]:
    """Return an array whose columns are the entries of an axis."""
    moved = np.moveaxis(value, axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _transform(variable: xarray.DataArray, matrix: Float[np.ndarray, "Q Q"], axis: int) -> xarray.DataArray:
    """Multiply the vectors along an axis of a variable by a matrix."""
    rows = np.moveaxis(variable.values, axis, -1) @ matrix.astype(variable.dtype)
    return variable.copy(data=np.moveaxis(rows, -1, axis))
