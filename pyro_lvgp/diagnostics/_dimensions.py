"""Names and coordinates of the dimensions of sampled sites, for xarray."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pyro_lvgp.infer.sampling import SampledSite

__all__ = ["label_dims", "name_dims", "per_draw", "squeeze"]


def _shape(site: SampledSite) -> torch.Size:
    """Return the shape in one draw, [*batch, *event]."""
    return site.value.shape if site.kind == "observed" else site.value.shape[1:]


def squeeze(site: SampledSite, value: Tensor, num_left: int = 0) -> np.ndarray:
    """Return an array without the batch dimensions of size one that belong to no plate."""
    undeclared = [i for i, plate in enumerate(site.plates) if plate is None and _shape(site)[i] == 1]
    return value.numpy().squeeze(tuple(num_left + i for i in undeclared))


def per_draw(site: SampledSite, value: Tensor) -> np.ndarray:
    """Return an array [chain, draw, ...] with one chain."""
    return squeeze(site, value, 1)[None]


def name_dims(
    sites: Mapping[str, SampledSite],
    constants: Mapping[str, np.ndarray],
    declared: Mapping[str, Sequence[str]],
    given: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Return the names of the dimensions of every site, without those of draws, and of every array of constant data."""
    if unknown := sorted(set(given) - set(sites) - set(constants)):
        known = sorted({*sites, *constants})
        raise ValueError(f"dims: expected names of sites and constants, among {known}, got {unknown}; correct the keys.")
    result = {}
    for name, array in constants.items():
        result[name] = list(given.get(name, declared.get(name, [f"{name}_dim_{i}" for i in range(array.ndim)])))
        if len(result[name]) != array.ndim:
            raise ValueError(
                f"dims of constant_data '{name}': expected a name for each of {array.ndim} dimensions, got {result[name]}; "
                "name all dimensions."
            )
    for name, site in sites.items():
        batch = zip(site.plates, _shape(site), strict=False)
        plates = [plate or f"{name}_batch_{i}" for i, (plate, size) in enumerate(batch) if plate or size != 1]
        defaults = [f"{name}_dim_{i}" for i in range(site.event_dim)]
        events = list(given.get(name, declared.get(name, defaults)))
        if len(events) != site.event_dim:
            raise ValueError(
                f"dims of site '{name}': expected a name for each of {site.event_dim} event dimensions, got {events}; "
                "leave out dimensions of plates, which are named by their plates."
            )
        result[name] = plates + events
        if len(set(result[name])) < len(result[name]):
            raise ValueError(f"dims of site '{name}': expected different names, got {result[name]}; rename in dims.")
        if taken := sorted({"chain", "draw"} & set(result[name])):
            raise ValueError(f"site '{name}': expected other names than ArviZ's own {taken}; rename the plate, or in dims.")
    return result


def label_dims(
    sites: Mapping[str, SampledSite],
    constants: Mapping[str, np.ndarray],
    names: Mapping[str, Sequence[str]],
    plates: Mapping[str, Tensor],
    given: Mapping[str, ArrayLike],
) -> dict[str, np.ndarray]:
    """Return the coordinates of every dimension: those given, else the rows of a plate, else 0, 1, …"""
    sizes: dict[str, int] = {}
    shapes = {name: squeeze(site, site.value, 0 if site.kind == "observed" else 1).shape for name, site in sites.items()}
    for name, shape in [*shapes.items(), *((name, array.shape) for name, array in constants.items())]:
        for dim, size in zip(reversed(names[name]), reversed(shape), strict=False):
            if sizes.setdefault(dim, size) != size:
                raise ValueError(
                    f"dimension '{dim}': expected one size, got {sizes[dim]} and, at '{name}', {size}; use two names in dims."
                )
    if unknown := set(given) - set(sizes):
        raise ValueError(f"coords: expected dimensions among {sorted(sizes)}, got {sorted(unknown)}; correct coords or dims.")
    labels = {}
    for dim, size in sizes.items():
        rows = plates[dim].numpy() if dim in plates else np.arange(size)
        label = np.asarray(given.get(dim, rows))
        if len(label) != size and dim in plates and len(label) > rows.max():
            label = label[rows]  # of the full plate
        if len(label) != size:
            raise ValueError(f"coords of '{dim}': expected {size} values, got {len(label)}; correct coords.")
        labels[dim] = label
    return labels
