"""Named arrays with their units and source."""

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, repr=False, eq=False)
class Dataset:
    """Named arrays with description, units, citation and licence; ``data["X"]`` or ``data.X`` returns an array.

    ``dict(data)`` is a dictionary of the arrays.  Missing values are NaN in float arrays; other arrays have none.

    :param name: name of the data set.
    :param arrays: the arrays by name.
    :param description: description of the measurements.
    :param units: content of each array, with its unit, by array name.
    :param citation: the publication to cite.
    :param licence: terms of the data, as far as they are known.
    :param source: origin of the data.

    >>> data = Dataset("demo", {"X": np.zeros((3, 2))}, "Three points.", {"X": "position [m]"}, "none", "none", "here")
    >>> data.X.shape, list(data)
    ((3, 2), ['X'])
    """

    name: str
    arrays: Mapping[str, np.ndarray]
    description: str
    units: Mapping[str, str]
    citation: str
    licence: str
    source: str

    def __getitem__(self, key: str) -> np.ndarray:
        """Return the array of a name."""
        if key not in self.arrays:
            raise KeyError(f"data set {self.name!r}: expected one of the arrays {list(self.arrays)}, got {key!r}.")
        return self.arrays[key]

    def __getattr__(self, key: str) -> Any:
        # Called for names that are no fields only.  Access by __dict__ avoids infinite recursion in copies and unpickling.
        arrays = self.__dict__.get("arrays", {})
        if key not in arrays:
            raise AttributeError(
                f"data set {self.__dict__.get('name')!r}: expected one of the arrays {list(arrays)}, got {key!r}."
            )
        return arrays[key]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.arrays})

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __contains__(self, key: object) -> bool:
        return key in self.arrays

    def keys(self) -> KeysView[str]:
        """Return the names of the arrays."""
        return self.arrays.keys()

    def __repr__(self) -> str:
        width = max(map(len, self.arrays), default=0)
        lines = [f"Dataset {self.name!r}: {self.description}"]
        for name, array in self.arrays.items():
            missing = num_missing(array)
            lines.append(
                f"  {name:{width}}  {array.shape} {array.dtype}, {self.units.get(name, 'no unit stated')}"
                + (f" ({missing:,} of {array.size:,} missing)" if missing else "")
            )
        return "\n".join([*lines, f"  Cite: {self.citation}", f"  Licence: {self.licence}", f"  Source: {self.source}"])


def num_missing(array: np.ndarray) -> int:
    """Count the NaN entries of a float array; other arrays have none.

    :param array: any array.

    >>> num_missing(np.array([1.0, np.nan])), num_missing(np.array(["a"]))
    (1, 0)
    """
    return int(np.isnan(array).sum()) if array.dtype.kind == "f" else 0
