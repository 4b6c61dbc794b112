"""First base of annealed chains: a Gaussian with a large bound, from the location of a mean-field guide."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from pyro.poutine import Trace
from torch import Tensor

from pyro_lvgp.guides.annealed._gaussian_fit import full_covariance_optimum, mean_field_optimum
from pyro_lvgp.guides.annealed._joint_density import JointDensity
from pyro_lvgp.guides.annealed._pathfinder import best_on_path
from pyro_lvgp.guides.annealed._recorded_target import RecordedTarget
from pyro_lvgp.guides.annealed._targets import TracedTarget
from pyro_lvgp.guides.annealed._whitened import Whitened
from pyro_lvgp.guides.annealed.transitions import Coordinates
from pyro_lvgp.guides.mean_field import MeanFieldGuide


class FirstBase(NamedTuple):
    """Gaussian of all coordinates.

    :param loc: mean of each site.
    :param factor: Cholesky factor of the covariance of all coordinates [P, P], or its diagonal [P] if that is diagonal.
    """

    loc: Coordinates
    factor: Tensor


def first_base(
    guide: MeanFieldGuide,
    model: Callable[..., Any],
    names: Sequence[str],
    args: tuple,
    kwargs: dict,
    *,
    correlated: bool,
) -> FirstBase:
    """Return a Gaussian of all latent sites with a large bound, found from the location of a guide.

    :param guide: the guide, with all rows.
    :param model: its model.
    :param names: names of all latent sites, in the order of the results.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param correlated: as for :func:`best_gaussian`.
    """
    moments = (guide.loc_and_stddev(name, args) for name in names)
    gaussians = [(loc.detach(), stddev.detach()) for loc, stddev in moments]
    locs, stddevs = zip(*gaussians, strict=True)
    # Coordinates that a base N(0, 1) whitens are unconstrained ones.
    coordinates = [replace(guide.coordinates[name], covariance="diagonal") for name in names]
    units = tuple((torch.zeros_like(loc), torch.ones_like(loc)) for loc in locs)
    sites = Whitened(tuple(zip(names, coordinates, strict=True)))
    target = TracedTarget(
        model, sites, units, Trace(), marginalize=False, local_plate=None, differentiable=False, args=args, kwargs=kwargs
    )
    event_dims = [site.event_dim for site in coordinates]
    density = JointDensity.of_target(RecordedTarget(target), gaussians, event_dims, target.sites_at(locs))
    loc, stddev = density.join(locs), density.join(stddevs)
    loc, factor = best_gaussian(density, loc, stddev, correlated=correlated)
    return FirstBase(density.split(loc), factor)


def best_gaussian(
    density: JointDensity, loc: Float[Tensor, " P"], stddev: Float[Tensor, " P"], *, correlated: bool
) -> tuple[Float[Tensor, " P"], Tensor]:
    """Return mean and standard deviations, or a Cholesky factor, of the Gaussian with the largest bound that is found.

    :param density: the density.
    :param loc: where the search starts.
    :param stddev: standard deviations there.
    :param correlated: try a covariance with correlations, too.
    """
    *start, largest = best_on_path(density, loc, stddev)
    found = mean_field_optimum(density, *start)
    if (bound := density.bound(*found)) > largest:
        largest = bound
    else:
        found = (start[0], start[1])
    return (full_covariance_optimum(density, *found, largest) if correlated else None) or found
