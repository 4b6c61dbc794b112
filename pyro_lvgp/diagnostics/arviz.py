"""Export of draws from a guide to ArviZ."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import arviz_base
import numpy as np
import pyro
import xarray
from numpy.typing import ArrayLike

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp.diagnostics._dimensions import label_dims, name_dims, per_draw, squeeze
from pyro_lvgp.infer.protocols import HasEventDims, HasInputs
from pyro_lvgp.infer.sampling import SampledSite, SampledTraces, sample_traces

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
    prior: bool = False,
    constant_data: Mapping[str, ArrayLike] | None = None,
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
    ``log_prior``              log density of each latent site in the model, given the sites on which it depends
    ``observed_data``          the data, NaN where missing
    ``constant_data``          inputs of the model, and ``constant_data``
    ``prior``                  with ``prior=True``: all latent and deterministic sites, drawn from the model alone
    ``prior_predictive``       with ``prior=True``: data simulated at these draws
    ``sample_stats``           ``lp`` = log p(y, z), ``lq`` = log q(z), ``log_weight`` = lp − lq of every draw
    =========================  ======================================================================================

    Draws have dimensions ``chain``, of size one, and ``draw``.  The dimension of a plate has its name, with the indices of its
    rows, or of its subsample, as coordinates.  Event dimensions are named by ``dims``, else by the model's
    attribute ``event_dims``, else ``<site>_dim_0`` and so on.

    **Weights.**  Draws come from q, not from the posterior.  ``log_weight`` corrects that for models of few latents.  With a
    latent for each of some hundred data these weights collapse, and ``arviz_stats.loo`` and ``loo_approximate_posterior``
    fail.  For leave-one-out densities use :func:`loo`, which integrates the latents of the data out.

    **Counts** and other data whose distribution has integers as support are integers in the tree, whatever their dtype.

    **Missing entries.**  With a NaN in ``log_likelihood``, ``loo`` returns NaN, and ``loo_pit`` counts it as an
    observation.  If any entry of a site ``y`` is masked or NaN, its log likelihood therefore is a variable ``y_observed`` with
    one dimension, ``y_entry``, over observed entries only, whose positions are the coordinates ``y_<dim>``.
    ``posterior_predictive`` and ``observed_data`` then have ``y_observed`` with the same entries, and ``y`` with all entries.
    :func:`observed_entries` selects the former for ``loo_pit`` and the plots.

    :param model: any Pyro model.
    :param guide: any Pyro guide for it.
    :param args: arguments of both, data included.
    :param num_samples: number of draws.
    :param chunk_size: number of draws in memory at once, on the device of the model.
    :param vectorize: False runs model and guide draw by draw, for those that do not broadcast over draws.
    :param posterior_predictive: False omits this group.
    :param log_likelihood: False omits this group.
    :param prior: draw from the model alone too, ``num_samples`` times.
    :param constant_data: further variables of the group ``constant_data``, such as covariates, by name.
    :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
    :param coords: coordinates by dimension; for a subsampled plate those of its subsample or of the full plate.
    :param dims: names of the event dimensions by site, and of all dimensions of variables in ``constant_data``.
    :param kwargs: keyword arguments of model and guide.
    :raises ValueError: if names do not fit the sites, or a dimension has two sizes.
    :raises RuntimeError: if model or guide cannot make several draws at once.

    >>> import torch
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
        prior=prior,
        seed=seed,
        device="cpu",
        **kwargs,
    )
    declared, constants = _inputs(model, args, kwargs)
    constants |= {name: np.asarray(value) for name, value in (constant_data or {}).items()}
    if isinstance(model, HasEventDims):
        declared |= model.event_dims
    names = name_dims(draws.sites, constants, declared, dims or {})
    labels = label_dims(draws.sites, constants, names, draws.plates, coords or {})
    groups = _groups_without_data(draws) | {"constant_data": constants}
    positions: dict[str, Positions] = {}
    for name, site in draws.sites.items():
        if site.is_observed is None:
            continue
        arrays, observed = _observed_arrays(site), squeeze(site, site.is_observed)
        if not observed.all():
            positions[f"{name}_observed"] = _add_observed_entries(name, arrays, observed, groups, names, labels)
        for group, array in arrays.items():
            groups[group][name] = array
    tree = _make_tree(groups, names, labels)
    for variable, position in positions.items():
        for node in tree.children.values():
            if variable in node.data_vars:
                node.dataset = node.to_dataset().assign_coords(position)
    return tree


def _groups_without_data(draws: SampledTraces) -> Groups:
    """Return the groups of unobserved sites and of statistics, and empty groups of the data."""
    stats = {"lp": draws.log_p, "lq": draws.log_q, "log_weight": draws.log_p - draws.log_q}
    sites = {name: site for name, site in draws.sites.items() if site.kind != "observed"}
    return {
        "posterior": {name: per_draw(site, site.value) for name, site in sites.items()},
        "posterior_predictive": {},
        "log_likelihood": {},
        "log_prior": {name: per_draw(site, site.log_prior) for name, site in sites.items() if site.log_prior is not None},
        "prior": {name: per_draw(site, site.prior) for name, site in sites.items() if site.prior is not None},
        "prior_predictive": {},
        "observed_data": {},
        "sample_stats": {name: value.numpy()[None] for name, value in stats.items()},
    }


def _inputs(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[dict[str, Sequence[str]], dict[str, np.ndarray]]:
    """Return names of dimensions, and values, of the arguments that a model declares as inputs, both by argument."""
    if not isinstance(model, HasInputs):
        return {}, {}
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    arrays = {name: given[name].detach().cpu().numpy() for name in model.input_dims if name in given}
    return {name: model.input_dims[name][-array.ndim :] for name, array in arrays.items()}, arrays


def _make_tree(groups: Groups, names: Mapping[str, list[str]], labels: Mapping[str, np.ndarray]) -> xarray.DataTree:
    """Make a tree of the groups that have variables."""
    found = {
        group: arviz_base.dict_to_dataset(
            arrays,
            dims={name: [*dims] for name, dims in names.items()},
            coords={**labels},
            sample_dims=[] if group in ("observed_data", "constant_data") else None,
            skip_event_dims=group in ("log_likelihood", "log_prior"),  # a number for each entry, or for each row
        )
        for group, arrays in groups.items()
        if arrays
    }
    tree = xarray.DataTree.from_dict(found)
    tree.attrs = {"inference_library": "pyro", "inference_library_version": pyro.__version__}
    return tree


def _observed_arrays(site: SampledSite) -> dict[str, np.ndarray]:
    """Return the arrays of an observed site, by group."""
    arrays = {"observed_data": squeeze(site, site.value)}
    if site.prediction is not None:
        arrays["posterior_predictive"] = per_draw(site, site.prediction)
    if site.prior is not None:
        arrays["prior_predictive"] = per_draw(site, site.prior)
    if site.is_discrete:  # functions of ArviZ tell counts by their dtype
        arrays = {group: np.nan_to_num(array).astype(np.int64) for group, array in arrays.items()}
    if site.log_likelihood is not None:
        arrays["log_likelihood"] = per_draw(site, site.log_likelihood)
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


def _with_nan(value: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Return a floating-point copy with NaN at entries that are not observed."""
    dtype = value.dtype if np.issubdtype(value.dtype, np.floating) else np.float64
    value = value.astype(dtype)
    value[~observed] = np.nan
    return value
