"""Export of several fits to ArviZ, each as a chain."""

from collections.abc import Callable, Sequence
from typing import Any

import xarray

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.diagnostics._alignment import align
from pyro_lvgp.diagnostics.arviz import to_arviz
from pyro_lvgp.infer import Restarts

__all__ = ["chains_to_arviz"]


@names_types
def chains_to_arviz(
    fits: Restarts | Sequence[tuple[Callable[..., Any], Callable[..., Any]]],
    *args: Any,
    align_latents: bool = True,
    seed: int | None = None,
    **options: Any,
) -> xarray.DataTree:
    r"""Draw from the guides of several fits, such as those from different seeds, and return each as a chain.

    Groups and variables are those of :func:`to_arviz`.  ArviZ's :math:`\hat R` then compares the variance between fits with
    that within: :math:`\hat R \gg 1` means that fits end in different optima, whose spread no single guide shows.  Draws of
    one guide are independent, so that :math:`\hat R` says nothing about the distance of a guide from the posterior.

    **Alignment.**  Latents of equally good fits differ by transformations under which the model is the same: those of a
    GPLVM by orthogonal matrices if its kernel has one lengthscale, and by signed permutations if it has one for each latent
    dimension; the processes of a GP-VAE by signed permutations.  The latents of each chain are transformed so that their
    means are as close as possible to those of the first chain, and lengthscales and other sites of the same dimensions with
    them, if the model has a :class:`~pyro_lvgp.infer.protocols.LatentSymmetry`.  The attribute ``alignment`` of the tree says
    which sites were aligned, or why none was, and ``alignment_matrices`` has the matrices.

    :param fits: result of :func:`~pyro_lvgp.infer.fit_restarts`, or pairs of a model and its fitted guide, all with the same
        sites and shapes.
    :param args: arguments of all.
    :param align_latents: False exports latents as they are.
    :param seed: seed of the draws of the first pair; that of the next is greater by one, and so on.  None draws from the
        global state.
    :param options: further arguments of :func:`to_arviz`.
    :raises ValueError: without pairs, or if the sites or shapes of two fits differ.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
    >>> guides = [lambda y, loc=loc: pyro.sample("loc", dist.Normal(loc, 0.1)) for loc in (-1.0, 0.0, 1.0)]
    >>> tree = chains_to_arviz([(model, guide) for guide in guides], torch.zeros(4), num_samples=50)
    >>> dict(tree.posterior["loc"].sizes)
    {'chain': 3, 'draw': 50}
    >>> import arviz_stats
    >>> bool(arviz_stats.rhat(tree)["loc"] > 2.0)  # the fits differ
    True

    Source: Gelman and Rubin (1992), "Inference from iterative simulation using multiple sequences"; Schönemann (1966), "A
    generalized solution of the orthogonal Procrustes problem".
    """
    if not fits:
        raise ValueError("expected a pair of model and guide or more, got none; pass [(model, guide), ...]")
    pairs = [(restart.model, restart.guide) for restart in fits] if isinstance(fits, Restarts) else fits
    trees = [
        to_arviz(model, guide, *args, seed=None if seed is None else seed + chain, **options)
        for chain, (model, guide) in enumerate(pairs)
    ]
    _check_groups(trees)
    alignment = align([model for model, _ in pairs], trees) if align_latents else {}
    groups: dict[str, xarray.Dataset] = {}
    for name, first in trees[0].children.items():
        datasets = [tree[name].to_dataset() for tree in trees]
        if "chain" not in first.dims:  # the data, which are those of all fits
            groups[name] = datasets[0]
            continue
        numbered = [each.assign_coords(chain=[chain]) for chain, each in enumerate(datasets)]
        groups[name] = xarray.concat(numbered, "chain", join="exact", combine_attrs="override")
    result = xarray.DataTree.from_dict(groups)
    result.attrs = trees[0].attrs | alignment
    return result


def _check_groups(trees: Sequence[xarray.DataTree]) -> None:
    """Raise unless all trees have the same groups, with the same variables of the same sizes."""
    for name in trees[0].children:
        datasets = [tree[name].to_dataset() for tree in trees if name in tree.children]
        sizes = [{variable: dict(each[variable].sizes) for variable in each.data_vars} for each in datasets]
        if len(sizes) < len(trees) or any(size != sizes[0] for size in sizes):
            raise ValueError(f"expected fits with the same sites of the same shapes in group '{name}', got {sizes}")
