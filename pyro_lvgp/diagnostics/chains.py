"""Export of several fits to ArviZ, each as a chain."""

from collections.abc import Callable, Sequence
from typing import Any

import xarray

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.diagnostics.arviz import to_arviz

__all__ = ["chains_to_arviz"]


@names_types
def chains_to_arviz(
    fits: Sequence[tuple[Callable[..., Any], Callable[..., Any]]], *args: Any, seed: int | None = None, **options: Any
) -> xarray.DataTree:
    r"""Draw from the guides of several fits, such as those from different seeds, and return each as a chain.

    Groups and variables are those of :func:`to_arviz`.  ArviZ's :math:`\hat R` then compares the variance between fits with
    that within: :math:`\hat R \gg 1` means that fits end in different optima, whose spread no single guide shows.  Draws of
    one guide are independent, so that :math:`\hat R` says nothing about the distance of a guide from the posterior.  Compare
    sites that the likelihood identifies: latents of a GPLVM, which can be rotated, differ between fits that are equally
    good, but their predictions do not.

    :param fits: pairs of a model and its fitted guide, all with the same sites and shapes.
    :param args: arguments of all.
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

    Source: Gelman and Rubin (1992), "Inference from iterative simulation using multiple sequences".
    """
    if not fits:
        raise ValueError("expected a pair of model and guide or more, got none; pass [(model, guide), ...]")
    trees = [
        to_arviz(model, guide, *args, seed=None if seed is None else seed + chain, **options)
        for chain, (model, guide) in enumerate(fits)
    ]
    groups: dict[str, xarray.Dataset] = {}
    for name, first in trees[0].children.items():
        datasets = [tree[name].to_dataset() for tree in trees if name in tree.children]
        sizes = [{variable: dict(each[variable].sizes) for variable in each.data_vars} for each in datasets]
        if len(sizes) < len(trees) or any(size != sizes[0] for size in sizes):
            raise ValueError(f"expected fits with the same sites of the same shapes in group '{name}', got {sizes}")
        if "chain" not in first.dims:  # the data, which are those of all fits
            groups[name] = datasets[0]
            continue
        numbered = [each.assign_coords(chain=[chain]) for chain, each in enumerate(datasets)]
        groups[name] = xarray.concat(numbered, "chain", join="exact", combine_attrs="override")
    result = xarray.DataTree.from_dict(groups)
    result.attrs = dict(trees[0].attrs)
    return result
