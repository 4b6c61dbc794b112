"""Arrays of data sets that ``load_dataset`` does not know."""

import os
from pathlib import Path

import numpy as np


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
