"""Counts of cells and their known quantities from AnnData objects, and latents into them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.tables import Table, as_tensor
from pyro_lvgp.models import RowArguments

__all__ = ["Cells", "from_anndata", "write_latents"]


class Cells(NamedTuple):
    """Table of cells and genes, with what is known of each cell.

    :param table: a ``pandas.DataFrame`` [N, D] with the names of cells and genes.
    :param rows: known quantities of the cells; None for nothing.
    :param categories: categories of the columns of ``obs`` that became indicators, for further cells.
    """

    table: Any
    rows: RowArguments | None
    categories: dict[str, list]


@names_types
def from_anndata(
    adata: Any,
    *,
    layer: str | None = None,
    exposure: str | None = None,
    covariates: Sequence[str] = (),
    weight: str | None = None,
    categories: Mapping[str, Sequence] | None = None,
) -> Cells:
    r"""Select a table of cells and genes, and columns of ``obs`` as known quantities of the cells.

    The arguments of a model are then :math:`y_{nd}`, an entry of the layer; the exposure :math:`e_n`; and covariates
    :math:`c_n`, with an indicator for each category of a column of categories
    (:class:`~pyro_lvgp.models.RowArguments`).

    :param adata: an ``anndata.AnnData`` object.
    :param layer: name of a layer; ``X`` if None.  Counts, as ``NegativeBinomial`` needs, are often in a layer.
    :param exposure: ``"total"`` for the sum of the entries of a cell, or the name of a column of ``obs``, such as library
        sizes over all genes; None for none.
    :param covariates: names of columns of ``obs``, of numbers or of categories, such as batches.
    :param weight: name of a column of ``obs``; None for none.
    :param categories: ``categories`` of the training cells, for further cells, which need not be of all categories.
    :raises TypeError: for another object.
    :raises ValueError: for a layer or a column that the object does not have, a column of text, or a category that the
        training cells do not have.

    >>> import pandas
    >>> from anndata import AnnData  # doctest: +SKIP
    >>> obs = pandas.DataFrame({"batch": pandas.Categorical(["a", "b"])}, ["cell_1", "cell_2"])  # doctest: +SKIP
    >>> cells = from_anndata(AnnData(np.eye(2), obs), exposure="total", covariates=["batch"])  # doctest: +SKIP
    >>> cells.rows.covariates  # doctest: +SKIP
    tensor([[1., 0.],
            [0., 1.]])

    Source: Virshup et al. (2024), "anndata: Access and store annotated data matrices".
    """
    if not (hasattr(adata, "obs_names") and hasattr(adata, "to_df")):
        raise TypeError(
            f"expected adata to be an anndata.AnnData object, got {type(adata).__name__}; models take other tables themselves"
        )
    if layer is not None and layer not in adata.layers:
        raise ValueError(f"expected a layer of {sorted(adata.layers)}, got {layer!r}; leave it out for X")
    table = adata.to_df(layer=layer)
    values = as_tensor(table, name="the layer")
    used: dict[str, list] = {}
    parts: dict[str, Tensor] = {}
    if exposure is not None:
        sizes = values.sum(1) if exposure == "total" else as_tensor(_column(adata, exposure), name=f"obs[{exposure!r}]")
        parts["exposure"] = sizes.to(values)
    if weight is not None:
        parts["weight"] = as_tensor(_column(adata, weight), name=f"obs[{weight!r}]").to(values)
    columns = [_indicators(name, _column(adata, name), categories or {}, used) for name in covariates]
    if columns:
        parts["covariates"] = torch.cat([column.to(values) for column in columns], 1)
    return Cells(table, RowArguments(**parts) if parts else None, used)


def _column(adata: Any, name: str) -> Any:
    if name not in adata.obs:
        raise ValueError(f"expected a column of obs, {adata.obs.columns.tolist()}, got {name!r}; add it to adata.obs")
    return adata.obs[name]


def _indicators(name: str, column: Any, given: Mapping[str, Sequence], used: dict[str, list]) -> Tensor:
    """Return a column of numbers, or an indicator for each category of a column, and add the categories to ``used``."""
    if not hasattr(column.dtype, "categories"):
        if column.dtype.kind not in "fiub":
            raise ValueError(
                f"expected numbers or categories in obs[{name!r}], got {column.dtype}; call adata.strings_to_categoricals()"
            )
        return as_tensor(column, name=f"obs[{name!r}]")[:, None]
    used[name] = list(given.get(name, column.dtype.categories))
    if unknown := sorted({str(value) for value in column if value not in used[name]}):
        raise ValueError(
            f"expected the categories {used[name]} in obs[{name!r}] of every cell, got {unknown} too; select the cells of "
            "these categories"
        )
    return torch.tensor(np.stack([(column == category).to_numpy() for category in used[name]], 1), dtype=torch.double)


@names_types
def write_latents(adata: Any, latents: Tensor | Distribution | Table, key: str = "X_lvgp") -> None:
    """Write the latents of cells into ``obsm``, where the tools of single cells find them.

    Under the same key with the ending ``_stddev`` are standard deviations, if the latents are a distribution.

    :param adata: an ``anndata.AnnData`` object, which is changed.
    :param latents: latents [N, Q] of all cells, such as ``guide.median(Y)["X"]``, or their distribution, such as
        ``guide.stored_posterior("X")`` or that of ``infer_latents``.
    :param key: name in ``obsm``.
    :raises TypeError: for another object.
    :raises ValueError: for latents of another number of cells, or that are not finite.
    """
    if not (hasattr(adata, "obsm") and hasattr(adata, "n_obs")):
        raise TypeError(f"expected adata to be an anndata.AnnData object, got {type(adata).__name__}; pass one")
    moments = {key: latents.mean, f"{key}_stddev": latents.stddev} if isinstance(latents, Distribution) else {key: latents}
    arrays = {name: as_tensor(value, name="latents").numpy(force=True) for name, value in moments.items()}
    for values in arrays.values():
        if values.ndim != 2 or len(values) != adata.n_obs or not np.isfinite(values).all():
            raise ValueError(
                f"expected finite latents of {adata.n_obs} cells [{adata.n_obs}, Q], got {list(values.shape)}; pass those of "
                "the cells of this object, in its order"
            )
    adata.obsm.update(arrays)
