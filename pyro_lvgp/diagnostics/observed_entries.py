"""Selection of the observed entries of an ArviZ tree."""

import xarray

from pyro_lvgp._utils.argument_types import names_types

__all__ = ["observed_entries"]

_SUFFIX = "_observed"


@names_types
def observed_entries(tree: xarray.DataTree) -> xarray.DataTree:
    """Return a tree of :func:`to_arviz` with observed entries alone, for functions of ArviZ that take all variables.

    Where data ``y`` have missing entries, the tree has the observed entries as ``y_observed``, and all entries as ``y``.
    Functions such as ``plot_loo_pit`` and ``plot_ppc_pit`` compare all variables of predictions and data, and cannot be used
    with missing entries.  In the result ``y_observed`` is the only variable.  A tree without missing entries is returned as it
    is.

    :param tree: returned by :func:`to_arviz` or :func:`chains_to_arviz`; it does not change.

    >>> import pyro, torch
    >>> from pyro import distributions as dist
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mu, 1.0).mask(~y.isnan()), obs=y.nan_to_num())
    >>> def guide(y):
    ...     pyro.sample("mu", dist.Normal(0.0, 0.5))
    >>> from pyro_lvgp import to_arviz
    >>> tree = to_arviz(model, guide, torch.tensor([0.5, torch.nan, -0.2]), num_samples=10)
    >>> list(tree.observed_data.data_vars), list(observed_entries(tree).observed_data.data_vars)
    (['y_observed', 'y'], ['y_observed'])
    """
    whole = {
        name.removesuffix(_SUFFIX)
        for name in map(str, tree["observed_data"].data_vars)
        if name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) in tree["observed_data"].data_vars
    }
    of_data = ("observed_data", "posterior_predictive", "prior_predictive")
    groups = {
        name: node.to_dataset().drop_vars(whole & set(map(str, node.data_vars))) if name in of_data else node.to_dataset()
        for name, node in tree.children.items()
    }
    result = xarray.DataTree.from_dict(groups)
    result.attrs = dict(tree.attrs)
    return result
