"""Tables of several views of the same rows."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pyro_lvgp._utils.tables import as_double_tensor, labels_of

_TAKEN = frozenset(dir(nn.ModuleDict))


def check_names(names: Any) -> None:
    """Raise unless names of views can be names of modules and sites.

    :raises ValueError: for no view, or for a name that is no identifier, or that of a method of modules.
    """
    if not names:
        raise ValueError("expected one view or more, got none; pass a mapping from names to tables")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise ValueError(
                f"expected names of views that are identifiers, and no methods of modules, got {name!r}; rename the view"
            )


def check_known(names: Any, views: Any, argument: str) -> None:
    """Raise if a mapping has names that are not those of views.

    :param names: the names.
    :param views: names of the views.
    :param argument: name of the mapping.
    :raises ValueError: for another name.
    """
    if unknown := [name for name in names if name not in views]:
        raise ValueError(f"expected views among {list(views)} in {argument}, got {unknown}; correct the names")


def check_distinct(parts: Mapping[str, Any], argument: str) -> None:
    """Raise if two views have the same object, whose parameters Pyro would register under two names.

    :param parts: objects by view.
    :param argument: name of the mapping.
    :raises ValueError: for the same object at two views.
    """
    names: dict[int, str] = {}
    for name, part in parts.items():
        if (first := names.setdefault(id(part), name)) != name:
            raise ValueError(
                f"expected a {argument} of its own for each view, got one {type(part).__name__} for {first!r} and {name!r}; "
                "make two"
            )


def slices(view_dims: Mapping[str, int]) -> dict[str, slice]:
    """Return the columns of each view in the table of all.

    :param view_dims: number of columns by view.

    >>> slices({"a": 2, "b": 1})
    {'a': slice(0, 2, None), 'b': slice(2, 3, None)}
    """
    ends = pairwise(accumulate(view_dims.values(), initial=0))
    return {name: slice(*each) for name, each in zip(view_dims, ends, strict=True)}


def matrices(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return each view as a matrix of numbers, NaN where missing.

    :param data: tables by view: tensors, arrays, data frames or nested lists; one column may be a vector.
    :raises ValueError: for values that are not numbers, tables of other shapes, or views of different rows.
    :raises TypeError: for data that are no mapping.
    """
    if not isinstance(data, Mapping):
        raise TypeError(
            f"expected a mapping from names of views to tables, got {type(data).__name__}; pass {{'name': table, ...}}"
        )
    found: dict[str, Tensor] = {}
    for name, values in data.items():
        table = as_double_tensor(values, name=f"view {name!r}")
        table = table[:, None] if table.dim() == 1 else table
        if table.dim() != 2 or not table.numel():
            raise ValueError(
                f"expected view {name!r} of shape [rows, columns] or [rows], got {list(table.shape)}; flatten images to rows, "
                "and leave out a view without columns"
            )
        found[name] = table
    sizes = {name: len(table) for name, table in found.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"expected views of the same rows, got numbers of rows {sizes}; give a row without a view the value NaN in all "
            "columns of the view, as pandas' reindex does"
        )
    _check_order(data)
    return found


def _check_order(data: Mapping[str, Any]) -> None:
    """Raise if data frames or series have different indices, whose rows would not be the same."""
    frames = {name: index for name, values in data.items() if (index := labels_of(values).index) is not None}
    for (first, own), (name, index) in pairwise(frames.items()):
        if not index.equals(own):
            raise ValueError(
                f"expected views with the same index, got different ones of {first!r} and {name!r}; use reindex(...), which "
                "fills rows without a view by NaN, or pass arrays"
            )


def join(tables: Mapping[str, Tensor], columns: Mapping[str, slice]) -> Tensor:
    """Join the views to one table, NaN in the columns of views that are left out.

    :param tables: matrices by view, of one view or more.
    :param columns: columns of each view in the table.
    :raises ValueError: for no view, other names, or other numbers of columns.
    """
    check_known(tables, columns, "the data")
    if not tables:
        raise ValueError(f"expected data of one of the views {list(columns)} or more, got none; pass a view")
    first = next(iter(tables.values()))
    width = max(part.stop for part in columns.values())
    joined = torch.full((len(first), width), torch.nan, dtype=first.dtype, device=first.device)
    for name, table in tables.items():
        number = columns[name].stop - columns[name].start
        if table.shape[-1] != number:
            raise ValueError(f"expected {number} columns of view {name!r}, got {table.shape[-1]}; pass the columns of the fit")
        joined[:, columns[name]] = table
    return joined
