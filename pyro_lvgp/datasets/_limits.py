"""Limits of downloads: their size, their time, and their size after decompression."""

import gzip
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pooch

__all__ = ["check_npz", "download", "gunzip", "members"]

_MOST_BYTES = 2**30  # of a file, several times the largest one here
_MOST_SECONDS = 3600.0
_SECONDS_OF_SILENCE = 60.0


def download(url: str, path: Path, *, progressbar: bool = False) -> None:
    """Download a file.

    :param url: its address.
    :param path: where to write it.
    :param progressbar: whether to show the progress.
    :raises OSError: if the download fails, or exceeds a limit of size or time.
    """
    with path.open("wb") as file:
        pooch.HTTPDownloader(progressbar=progressbar, timeout=_SECONDS_OF_SILENCE)(url, _Limited(file), None)


def gunzip(path: Path) -> bytes:
    """Decompress a file of gzip.

    :param path: the file.
    :raises ValueError: if the result exceeds the limit of size.
    """
    with gzip.open(path) as file:
        content = file.read(_MOST_BYTES + 1)
    _check_size(len(content), path.name)
    return content


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Iterate over the members of an archive.

    :param archive: the open archive.
    :raises ValueError: before a member with which the total of sizes exceeds the limit.
    """
    total = 0
    for member in archive:
        total += member.size
        _check_size(total, f"archive with {member.name}")
        yield member


def check_npz(path: Path) -> None:
    """Raise unless the arrays of an npz file have a total size below the limit.

    :param path: the file.
    :raises ValueError: if they have not.
    """
    with zipfile.ZipFile(path) as archive:
        _check_size(sum(member.file_size for member in archive.infolist()), path.name)


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"{name}: expected at most {_MOST_BYTES:.1e} bytes after decompression, got {num_bytes:.1e} or more")


class _Limited:
    """File to which at most a number of bytes can be written, within a time.

    :param file: the open file.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._num_bytes, self._end = file, 0, time.monotonic() + _MOST_SECONDS

    def write(self, chunk: bytes) -> None:
        """Write bytes.

        :param chunk: the bytes.
        :raises OSError: beyond a limit.
        """
        self._num_bytes += len(chunk)
        if self._num_bytes > _MOST_BYTES or time.monotonic() > self._end:
            raise OSError(
                f"expected at most {_MOST_BYTES:.1e} bytes in {_MOST_SECONDS:.0f} s, got more ({self._num_bytes:.1e} bytes)"
            )
        self._file.write(chunk)

    def flush(self) -> None:
        """Do nothing, since the file is closed soon."""
