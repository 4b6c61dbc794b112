"""Export of draws from a guide to ArviZ."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import arviz_base
import numpy as np
import pyro
import torch
import xarray
from numpy.typing import ArrayLike
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp.infer.protocols import HasEventDims
from pyro_lvgp.infer.sampling import SampledSite, sample_traces

__all__ = ["to_arviz"]

Groups = dict[str, dict[str, np.ndarray]]
Positions = dict[str, tuple[str, np.ndarray]]


@names_types
@pyro_lock
def to_arviz(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int = 500,
    chunk_size: int = 50,
    vectorize: bool = True,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    seed: int | None = None,
    coords: Mapping[str, ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    **kwargs: Any,
) -> xarray.DataTree:
    r"""Draw from a guide, and return the draws with log densities and predictions as an ArviZ ``DataTree``.

    =========================  ======================================================================================
    ``posterior``              latent and deterministic sites of the model
    ``posterior_predictive``   data simulated at every draw, missing entries included
    ``log_likelihood``         :math:`\log p(y_i \mid z_s)` of every observed entry i
    ``observed_data``          the data, NaN where missing
    ``sample_stats``           ``lp`` = log p(y, z), ``lq`` = log q(z), ``log_weight`` = lp − lq of every draw
    =========================  ======================================================================================

    Draws have dimensions ``chain``, of size one, and ``draw``.  The dimension of a plate has its name, with the indices of its
    rows, or of its subsample, as coordinates.  Event dimensions are named by ``dims``, else by the model's
    attribute ``event_dims``, else ``<site>_dim_0`` and so on.

    **Weights.**  Draws come from q, not from the posterior.  ``log_weight`` corrects that for models of few latents.  With a
    latent for each of some hundred data these weights collapse, and ``arviz_stats.loo`` and ``loo_approximate_posterior``
    fail.  For leave-one-out densities use :func:`loo`, which integrates the latents of the data out.

    **Missing entries.**  With a NaN in ``log_likelihood``, ``loo`` returns NaN, and ``loo_pit`` counts it as an
    observation.  If any entry of a site ``y`` is masked or NaN, its log likelihood therefore is a variable ``y_observed`` with
    one dimension, ``y_entry``, over observed entries only, whose positions are the coordinates ``y_<dim>``.
    ``posterior_predictive`` and ``observed_data`` then have ``y_observed`` with the same entries, and ``y`` with all entries:
    ``loo_pit`` and the plots take ``var_names="y_observed"``.
    (``plot_loo_pit`` does not pass the names on: use ``plot_ecdf_pit(loo_pit(tree, var_names="y_observed"))``.)

    :param model: any Pyro model.
    :param guide: any Pyro guide for it.
    :param args: arguments of both, data included.
    :param num_samples: number of draws.
    :param chunk_size: number of draws in memory at once, on the device of the model.
    :param vectorize: False runs model and guide draw by draw, for those that do not broadcast over draws.
    :param posterior_predictive: False omits this group.
    :param log_likelihood: False omits this group.
    :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
    :param coords: coordinates by dimension; for a subsampled plate those of its subsample or of the full plate.
    :param dims: names of the event dimensions, by site.
    :param kwargs: keyword arguments of model and guide.
    :raises ValueError: if names do not fit the sites, or a dimension has two sizes.
    :raises RuntimeError: if model or guide cannot make several draws at once.

    >>> from pyro import distributions as dist
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mu, 1.0).to_event(1), obs=y)
    >>> def guide(y):
    ...     pyro.sample("mu", dist.Normal(y.mean(0), 0.5).to_event(1))
    >>> names = {"mu": ["output"], "y": ["output"]}
    >>> tree = to_arviz(model, guide, torch.zeros(3, 2), num_samples=10, dims=names)
    >>> dict(tree.log_likelihood["y"].sizes)
    {'chain': 1, 'draw': 10, 'data': 3, 'output': 2}

    Source: Yao et al. (2018), "Yes, but did it work? Evaluating variational inference", on weighting draws from q.
    """
    draws = sample_traces(
        model,
        guide,
        *args,
        num_samples=num_samples,
        chunk_size=chunk_size,
        vectorize=vectorize,
        predict=posterior_predictive,
        log_likelihood=log_likelihood,
        seed=seed,
        device="cpu",
        **kwargs,
    )
    names = _dims(draws.sites, model.event_dims if isinstance(model, HasEventDims) else {}, dims or {})
    labels = _coords(draws.sites, names, draws.plates, coords or {})
    stats = {"lp": draws.log_p, "lq": draws.log_q, "log_weight": draws.log_p - draws.log_q}
    groups: Groups = {
        "posterior": {name: _per_draw(s, s.value) for name, s in draws.sites.items() if s.kind != "observed"},
        "posterior_predictive": {},
        "log_likelihood": {},
        "observed_data": {},
        "sample_stats": {name: value.numpy()[None] for name, value in stats.items()},
    }
    positions: dict[str, Positions] = {}
    for name, site in draws.sites.items():
        if site.is_observed is None:
            continue
        arrays, observed = _observed_arrays(site), _squeeze(site, site.is_observed)
        if not observed.all():
            positions[f"{name}_observed"] = _add_observed_entries(name, arrays, observed, groups, names, labels)
        for group, array in arrays.items():
            groups[group][name] = array
    tree = arviz_base.from_dict(
        {group: arrays for group, arrays in groups.items() if arrays},
        dims=names,
        coords=labels,
        attrs={"/": {"inference_library": "pyro", "inference_library_version": pyro.__version__}},
    )
    for variable, position in positions.items():
        for node in tree.children.values():
            if variable in node.data_vars:
                node.dataset = node.to_dataset().assign_coords(position)
    return tree


def _observed_arrays(site: SampledSite) -> dict[str, np.ndarray]:
    """Return the arrays of an observed site, by group."""
    arrays = {"observed_data": _squeeze(site, site.value)}
    if site.prediction is not None:
        arrays["posterior_predictive"] = _per_draw(site, site.prediction)
    if site.log_likelihood is not None:
        arrays["log_likelihood"] = _per_draw(site, site.log_likelihood)
    return arrays


def _add_observed_entries(
    name: str,
    arrays: dict[str, np.ndarray],
    observed: np.ndarray,
    groups: Groups,
    names: dict[str, list[str]],
    labels: Mapping[str, np.ndarray],
) -> Positions:
    """Add a variable with the observed entries only to the groups, and set all other entries of the data to NaN.

    :param name: name of the site.
    :param arrays: arrays of the site, by group; its log likelihood is removed.
    :param observed: mask of the observed entries.
    :param groups: arrays by group and variable, to add to.
    :param names: dimensions by variable, to add to.
    :param labels: coordinates by dimension.
    :returns: coordinates of the observed entries.
    """
    variable, entry = f"{name}_observed", f"{name}_entry"
    for group, array in arrays.items():
        groups[group][variable] = array[observed] if group == "observed_data" else array[:, :, observed]
    arrays.pop("log_likelihood", None)
    arrays["observed_data"] = _with_nan(arrays["observed_data"], observed)
    indices = zip(names[name], np.nonzero(observed), strict=False)
    names[variable] = [entry, *names[name][observed.ndim :]]
    return {f"{name}_{dim}": (entry, labels[dim][index]) for dim, index in indices}


def _shape(site: SampledSite) -> torch.Size:
    """Return the shape in one draw, [*batch, *event]."""
    return site.value.shape if site.kind == "observed" else site.value.shape[1:]


def _squeeze(site: SampledSite, value: Tensor, num_left: int = 0) -> np.ndarray:
    """Return an array without the batch dimensions of size one that belong to no plate."""
    undeclared = [i for i, plate in enumerate(site.plates) if plate is None and _shape(site)[i] == 1]
    return value.numpy().squeeze(tuple(num_left + i for i in undeclared))


def _per_draw(site: SampledSite, value: Tensor) -> np.ndarray:
    """Return an array [chain, draw, ...] with one chain."""
    return _squeeze(site, value, 1)[None]


def _with_nan(value: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Return a floating-point copy with NaN at entries that are not observed."""
    dtype = value.dtype if np.issubdtype(value.dtype, np.floating) else np.float64
    value = value.astype(dtype)
    value[~observed] = np.nan
    return value


def _dims(
    sites: Mapping[str, SampledSite], declared: Mapping[str, Sequence[str]], given: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return the names of the dimensions of every site, without those of draws."""
    unknown = sorted(set(given) - set(sites))
    if unknown:
        raise ValueError(f"dims: expected names of sites, among {sorted(sites)}, got {unknown}; correct the keys.")
    result = {}
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


def _coords(
    sites: Mapping[str, SampledSite],
    names: Mapping[str, Sequence[str]],
    plates: Mapping[str, Tensor],
    given: Mapping[str, ArrayLike],
) -> dict[str, np.ndarray]:
    """Return the coordinates of every dimension: those given, else the rows of a plate, else 0, 1, …"""
    sizes: dict[str, int] = {}
    for name, site in sites.items():
        value = _squeeze(site, site.value, 0 if site.kind == "observed" else 1)
        for dim, size in zip(reversed(names[name]), reversed(value.shape), strict=False):
            if sizes.setdefault(dim, size) != size:
                raise ValueError(
                    f"dimension '{dim}': expected one size, got {sizes[dim]} and, at site '{name}', {size}; use two "
                    "names in dims."
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
