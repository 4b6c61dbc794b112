"""Tables of other libraries as tensors, and the labels of their rows and columns."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Labels", "Table", "as_double_tensor", "as_tensor", "check_columns", "labels_of", "numeric_table"]

Table = Any
"""A tensor, or anything that :func:`as_tensor` takes."""


class Labels(NamedTuple):
    """Labels of a table, None for those that it does not have.

    :param dims: names of the dimensions of rows and of columns.
    :param index: labels of the rows.
    :param columns: labels of the columns.
    """

    dims: tuple[str, str] | None = None
    index: Any = None
    columns: Any = None

    def coords(self, dims: Sequence[str]) -> dict[str, tuple[tuple[str, ...], Any]]:
        """Return coordinates of a :class:`~pyro_lvgp.models.Prediction`.

        :param dims: names of the dimensions of rows and of columns.
        """
        labels = zip(dims, (self.index, self.columns), strict=True)
        return {dim: ((dim,), values) for dim, values in labels if values is not None}


def labels_of(table: Table) -> Labels:
    """Return the labels of a table of any kind.

    :param table: data.
    """
    if _is_array_of_xarray(table):
        dims = tuple(table.dims)
        return Labels(dims, *(table.indexes.get(dim) for dim in dims)) if len(dims) == 2 else Labels()
    index = table.index if hasattr(table, "iloc") else None
    return Labels(None, index, getattr(table, "columns", None))


def check_columns(columns: Any, expected: Any, name: str) -> None:
    """Raise if the columns of a table have other labels, or another order of them, than those of the training data.

    :param columns: labels of the columns; None for a table without.
    :param expected: labels of the columns of the training data; None if unknown.
    :param name: name of the table in errors.
    """
    if columns is None or expected is None or list(columns) == list(expected):
        return
    if set(columns) == set(expected):
        raise ValueError(
            f"expected the columns of {name} in the order of the training data, {_short(expected)}, got {_short(columns)}; "
            "select them in that order: table[training.columns]"
        )
    raise ValueError(
        f"expected the columns of the training data, {_short(expected)}, in {name}, got {_short(columns)}; select or rename "
        "them, or pass an array, whose columns have no labels: table.to_numpy()"
    )


def as_tensor(table: Table, *, like: Tensor | None = None, name: str = "the table") -> Tensor:
    r"""Convert a table to a tensor, NaN where an entry is missing.

    =====================================================  ==================================================================
    table                                                  entries
    =====================================================  ==================================================================
    a tensor                                               is returned as it is
    an array, a nested list, a ``numpy.ma`` array          masked entries and None are missing
    a ``pandas.DataFrame`` or ``Series``                   NaN, None, ``pandas.NA`` and NaT are missing; of columns of ordered
                                                           categories, or of two, the numbers 0, 1, … of the categories
    a ``polars.DataFrame`` or ``Series``                   null and NaN are missing; ``Enum`` is ordered
    an ``xarray.DataArray``                                NaN is missing
    a sparse matrix or array of SciPy                      entries that are not stored are zeros, and observed
    =====================================================  ==================================================================

    Tensors of tables have the precision of their floating-point numbers, float32 or float64, and that of ``like`` or
    PyTorch's default dtype if they have none, as counts.

    :param table: the table.
    :param like: tensor whose dtype and device the result has, unless the table is a tensor.
    :param name: name of the table in errors.
    :raises ValueError: for text, dates, complex numbers and categories without an order, of which there are more than two.
    :raises TypeError: for an ``AnnData`` object, whose layer :func:`~pyro_lvgp.tables.from_anndata` selects.

    >>> import pandas
    >>> answers = pandas.Categorical(["no", None, "yes"], categories=["no", "yes"])
    >>> as_tensor(pandas.DataFrame({"age": pandas.array([31, 40, None]), "answer": answers}))
    tensor([[31.,  0.],
            [40., nan],
            [nan,  1.]])
    """
    if isinstance(table, Tensor):
        return table
    wanted = torch.get_default_dtype() if like is None else like.dtype
    default = np.float64 if wanted == torch.float64 else np.float32
    array = _as_array(table, name, default)
    values = torch.tensor(array.copy() if any(stride < 0 for stride in array.strides) else array)
    return values if like is None else values.to(like)


def as_double_tensor(table: Table, *, name: str) -> Tensor:
    """Convert a table to a tensor in double precision, in which integers such as seconds since 1970 keep all digits.

    :param table: the table, as for :func:`as_tensor`.
    :param name: name of the table in errors.
    """
    return as_tensor(table, like=torch.empty(0, dtype=torch.float64), name=name).double()


def numeric_table(table: Table, name: str = "X") -> Any:
    """Convert a table to an array, or to a data frame if its columns have labels, of numbers that scikit-learn takes.

    Arrays and lists are returned as they are.  Tables without floating-point numbers have double precision then, as
    scikit-learn gives such arrays.

    :param table: the table, as for :func:`as_tensor`.
    :param name: name of the table in errors.
    """
    if isinstance(table, Tensor):
        return table.numpy(force=True)
    if isinstance(table, np.ndarray | list) and not isinstance(table, np.ma.MaskedArray):
        return table  # scikit-learn has errors of its own for these
    values, labels = _as_array(table, name, np.float64), labels_of(table)
    if labels.columns is None or values.ndim != 2:
        return values
    import pandas as pd

    return pd.DataFrame(values, index=labels.index, columns=list(labels.columns), copy=False)


def _as_array(table: Table, name: str, default: Any) -> np.ndarray:
    """Convert a table to an array of floating-point numbers, of the default dtype if it has only others."""
    if hasattr(table, "obs_names") and hasattr(table, "var_names"):
        raise TypeError(
            f"expected {name} to be one table, got AnnData, which has several; use counts, rows, _ = "
            "pyro_lvgp.tables.from_anndata(adata)"
        )
    if hasattr(table, "nnz") and hasattr(table, "toarray"):
        table = table.toarray()
    elif _is_array_of_xarray(table):
        table = table.values
    elif hasattr(table, "get_column") or hasattr(table, "get_chunks"):
        table = _from_polars(table)
    if isinstance(table, np.ma.MaskedArray):
        table = np.ma.filled(table.astype(_precision([table.dtype], default)), np.nan)
    if hasattr(table, "iloc"):
        return _from_pandas(table, name, default)
    try:
        values = np.asarray(table)
    except (TypeError, ValueError) as error:  # lists of different lengths
        raise ValueError(f"expected {name} to be a table of numbers, got {type(table).__name__}; {_ADVICE}") from error
    if values.dtype == object and values.ndim in (1, 2):
        import pandas as pd

        frame = pd.DataFrame(values)
        if all(_is_numeric(frame.iloc[:, i]) for i in range(frame.shape[1])):
            return _from_pandas(frame, name, default).reshape(values.shape)
    if values.dtype.kind not in "fiub":
        advice = "divide durations by one, such as pandas.Timedelta(hours=1)" if values.dtype.kind == "m" else _ADVICE
        raise ValueError(f"expected {name} to be a table of numbers, got {type(table).__name__} of {values.dtype}; {advice}")
    return values.astype(_precision([values.dtype], default))


_ADVICE = "pass a tensor, an array, a data frame or a sparse matrix of numbers, NaN where missing"


def _is_array_of_xarray(table: Table) -> bool:
    return hasattr(table, "dims") and hasattr(table, "indexes") and hasattr(table, "dtype")


def _precision(dtypes: Iterable[Any], default: Any) -> Any:
    """Return the precision of the floating-point numbers among columns, or the default dtype if there are none."""
    floats = [dtype for dtype in dtypes if getattr(dtype, "kind", "O") in "fO" and not hasattr(dtype, "categories")]
    if not floats:
        return default
    of_numpy = [np.dtype(getattr(dtype, "subtype", getattr(dtype, "numpy_dtype", dtype))) for dtype in floats]
    return np.float32 if all(dtype.itemsize <= 4 and dtype.kind == "f" for dtype in of_numpy) else np.float64


def _from_pandas(table: Any, name: str, default: Any) -> np.ndarray:
    """Numbers of a data frame or of a series."""
    if table.ndim == 1:
        return _from_pandas(table.to_frame(), name, default)[:, 0]
    if all(isinstance(dtype, np.dtype) and dtype.kind in "fiub" for dtype in table.dtypes):
        return table.to_numpy(dtype=_precision(table.dtypes, default))
    columns = [table.iloc[:, i] for i in range(table.shape[1])]
    if refused := [label for label, column in zip(table.columns, columns, strict=True) if not _is_numeric(column)]:
        raise ValueError(
            f"expected numbers in the columns of {name}, or categories that are ordered or two, got others in "
            f"{_short(refused)}; drop them: table.drop(columns=[...]), convert text of numbers: "
            "table[column] = pandas.to_numeric(table[column]), make columns of indicators of them: "
            "pandas.get_dummies(table, columns=[...], dtype=float), or order their categories: "
            "table[column].astype(pandas.CategoricalDtype([...], ordered=True))"
        )
    precision = _precision(table.dtypes, default)
    return np.stack([_numbers(column, precision) for column in columns], 1)


def _is_numeric(column: Any) -> bool:
    """Whether a column has numbers, truth values, or categories that are ordered or two."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        return bool(column.dtype.ordered) or len(column.dtype.categories) <= 2
    if column.dtype == object:
        return pd.api.types.infer_dtype(column, skipna=True) in _NUMBERS
    return pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_complex_dtype(column.dtype)


_NUMBERS = ("integer", "floating", "mixed-integer-float", "boolean", "decimal", "empty")


def _numbers(column: Any, precision: Any) -> np.ndarray:
    """Numbers of a column, and of a column of categories the positions of these, NaN where missing."""
    if not hasattr(column.dtype, "categories"):
        return column.to_numpy(dtype=precision, na_value=np.nan)
    return column.cat.codes.astype(precision).where(column.notna(), np.nan).to_numpy()


def _from_polars(table: Any) -> Any:
    """Data frame of pandas with the columns of a data frame, or of a series, of polars."""
    import pandas as pd

    frame = table.to_frame() if hasattr(table, "to_frame") else table
    columns = {}
    for name, dtype in frame.schema.items():
        column = frame.get_column(name)
        kind = str(dtype).split("(")[0]
        if kind in ("Enum", "Categorical"):
            categories = dtype.categories.to_list() if kind == "Enum" else None
            columns[name] = pd.Categorical(column.to_list(), categories, ordered=kind == "Enum")
        elif kind == "Boolean" or dtype.is_integer():
            columns[name] = pd.array(column.to_list(), dtype="boolean" if kind == "Boolean" else "Int64")
        else:
            columns[name] = column.to_numpy() if dtype.is_float() else column.to_list()
    return pd.DataFrame(columns) if frame is table else pd.DataFrame(columns).iloc[:, 0]


def _short(labels: Any) -> str:
    """Print the first labels of many."""
    labels = list(labels)
    return f"{labels}" if len(labels) <= _MOST else f"{labels[:_MOST]} and {len(labels) - _MOST} more"


_MOST = 8  # printed labels
