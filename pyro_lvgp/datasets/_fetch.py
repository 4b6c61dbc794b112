"""Look-up, download and verification of data sets."""

import difflib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pooch
from tqdm import tqdm

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.datasets._dataset import Dataset
from pyro_lvgp.datasets._entry import Entry, File
from pyro_lvgp.datasets._limits import check_npz
from pyro_lvgp.datasets._limits import download as download_file
from pyro_lvgp.datasets._registry import REGISTRY

_FILE_HOST = "https://raw.githubusercontent.com"
_ARCHIVE_HOST = "https://codeload.github.com"
_FOLDER_VARIABLE = "PYRO_LVGP_DATA"


def list_datasets() -> list[str]:
    """Return the sorted names of the data sets for :func:`load_dataset`.

    >>> list_datasets()[:4]
    ['bridges', 'cifar10_gray', 'cifar10_rgb5k', 'congress109']
    """
    return sorted(REGISTRY)


@names_types
def load_dataset(name: str, *, download: bool = True) -> Dataset:
    """Load one of the papers' data sets.

    Looks for ``<name>.npz`` in the folder that the environment variable ``PYRO_LVGP_DATA`` names, then in the cache
    (``pooch.os_cache("pyro_lvgp")``); then downloads the public files, parses them and caches the arrays.  The arrays
    are always checked against a recorded digest.  Units, citation, licence and source are attributes of the result.

    - Small tables: "oilflow" [1000, 12], "wine_red" [1599, 11], "wine_white" [4898, 11], "bridges" [214, 4], "montreal"
      [261, 8], "congress109" [529, 1000], "newsgroups" [2752, 183].
    - Series and space: "eeg" [256, 7], "jura" [359, 7], "weather_trentino" [18262, 59, 3].
    - Images: "frey" [1965, 560], "yale" [165, 1024], "mnist" [60000, 784], "cifar10_gray" [50000, 1024],
      "cifar10_rgb5k" [5000, 32, 32, 3].

    "jura" and "weather_trentino" are R data files, whose download needs ``pip install rdata``.  The words
    of "newsgroups" are counted from single messages, for which the archive of their whole repository is downloaded.

    ``data = load_dataset("oilflow")`` gives ``data.X``, also ``data["X"]``, with the unit ``data.units["X"]``.

    :param name: one of :func:`list_datasets`.
    :param download: whether to download data that are neither in the folder nor in the cache.
    :raises ValueError: if the name is unknown, or a file or download does not hold the expected arrays.
    :raises FileNotFoundError: if the data are not on this machine and may not be downloaded.
    :raises OSError: if the download fails.
    :raises ModuleNotFoundError: if an R data file is to be read without the package ``rdata``.

    >>> load_dataset("oil_flow")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: expected one of the data sets ..., got 'oil_flow'. Did you mean 'oilflow'?
    """
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"expected one of the data sets {', '.join(list_datasets())}, got {name!r}.{hint}")
    entry = REGISTRY[name]
    return Dataset(
        name, _find(name, entry, download), entry.description, entry.units, entry.citation, entry.licence, entry.source
    )


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Compute the SHA-256 of sorted names, dtypes, shapes and bytes, which is equal for equal arrays.

    Byte order, memory layout, the bits of NaN and the sign of zero have no influence.

    :param arrays: arrays by name.

    >>> digest({"x": np.zeros(2)}) == digest({"x": -np.zeros(2)})
    True
    """
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), array.dtype.type("nan"), array) + array.dtype.type(0)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
        sha.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def _find(name: str, entry: Entry, download: bool) -> dict[str, np.ndarray]:
    """Read the arrays from the user's folder or the cache, or download them."""
    folder = _own_folder()
    if folder:
        path = folder / f"{name}.npz"
        if path.is_file():
            return _read_npz(path, entry, f"Replace the file, or unset {_FOLDER_VARIABLE} to have it downloaded.")
    cache = _cache_folder()
    path = cache / f"{name}.npz"
    if path.is_file():
        return _read_npz(path, entry, "Delete the file to have it downloaded anew.")
    own = f"put {name}.npz into a folder and set the environment variable {_FOLDER_VARIABLE} to it"
    place = f"in {_FOLDER_VARIABLE} ({folder or 'not set'}) or in the cache ({cache})"
    if not download:
        raise FileNotFoundError(
            f"data set {name!r}: expected {name}.npz {place}, got none. Allow the download (download=True), or {own}."
        )
    cache.mkdir(parents=True, exist_ok=True)
    arrays = _download(name, entry, cache, advice=f"Check the network, or {own}.")
    _write_npz(path, arrays)
    return arrays


def _own_folder() -> Path | None:
    """Return the folder that the environment variable names, or None."""
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder and not Path(folder).is_dir():
        raise FileNotFoundError(f"expected {_FOLDER_VARIABLE} to name a folder, got {folder!r}. Set or unset it.")
    return Path(folder) if folder else None


def _cache_folder() -> Path:
    return Path(pooch.os_cache("pyro_lvgp"))


def _read_npz(path: Path, entry: Entry, advice: str) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file, and check the SHA-256 of the file or the digest of the arrays."""
    got = pooch.file_hash(str(path))
    try:
        check_npz(path)
        # Given the path, NumPy would leave a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {key: content[key] for key in content.files}
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(f"{path}: expected sha256 {entry.sha256}, got {got}, not a readable npz. {advice}") from error
    if got != entry.sha256 and digest(arrays) != entry.digest:
        raise ValueError(
            f"{path}: expected sha256 {entry.sha256}, or arrays of digest {entry.digest}, got sha256 {got} and digest "
            f"{digest(arrays)}. {advice}"
        )
    return arrays


def _write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write a file in a temporary folder and rename it, so that it is never incomplete."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        np.savez_compressed(part, **arrays)
        part.replace(path)


def _url(file: File) -> str:
    """Return the URL of a file, or of the archive of the repository of a folder."""
    if file.path.endswith("/"):
        return f"{_ARCHIVE_HOST}/{file.repository}/tar.gz/{file.commit}"
    return f"{_FILE_HOST}/{file.repository}/{file.commit}/{file.path}"


def _download(name: str, entry: Entry, cache: Path, advice: str) -> dict[str, np.ndarray]:
    """Download the upstream files into a temporary folder, parse them and check the arrays."""
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        paths = [Path(folder) / f"{i:02d}_{Path(file.path).name}" for i, file in enumerate(entry.files)]
        single = len(paths) == 1  # a progress bar over bytes instead of files
        for file, path in zip(tqdm(entry.files, desc=name, unit="file", disable=single), paths, strict=True):
            url = _url(file)
            try:
                download_file(url, path, progressbar=single)
            except OSError as error:
                raise OSError(f"data set {name!r}: expected to download {url}, got: {error}. {advice}") from error
        changed = f"The download was damaged, or a source ({entry.source}) has changed. Try again. {advice}"
        try:
            arrays = entry.parse(paths)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # a damaged file can raise any exception
            raise ValueError(f"data set {name!r}: expected files of known form, got {error!r}. {changed}") from error
    got = digest(arrays)
    if got != entry.digest:
        raise ValueError(f"data set {name!r}: expected arrays of digest {entry.digest}, got {got}. {changed}")
    return arrays
