"""Arrays of data sets that ``load_dataset`` does not know."""

import importlib
import os
from pathlib import Path

import numpy as np
from jaxtyping import Float

_INDICES = {"year", "quarter", "individual"}


def load_arrays(name: str) -> dict[str, np.ndarray]:
    """Load the arrays of a file in the folder that PYRO_LVGP_DATA names.

    :param name: name of the file, without ``.npz``.
    :raises FileNotFoundError: if there is no such file.
    """
    path = Path(os.environ.get("PYRO_LVGP_DATA", ".")) / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(f"expected {path.name} in the folder that PYRO_LVGP_DATA names; see docs/datasets.md")
    with np.load(path) as data:
        return {key: data[key] for key in data.files}


def load_statsmodels(name: str) -> Float[np.ndarray, "N D"]:
    """Load the numeric columns of a data set that comes with statsmodels, without those that only number the rows.

    Year, quarter and individual are such numbers.

    :param name: name of the module in ``statsmodels.datasets``.
    """
    frame = importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data.select_dtypes("number")
    return frame[[column for column in frame if column.lower() not in _INDICES]].to_numpy(np.float64)
