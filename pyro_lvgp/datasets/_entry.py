"""Entries of the registry of data sets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


class File(NamedTuple):
    """File, or folder if ``path`` ends with a slash, of a public GitHub repository at a fixed commit."""

    repository: str
    commit: str
    path: str


@dataclass(frozen=True)
class Entry:
    """Entry of one data set.

    :param description: description of the measurements.
    :param units: content of each array, with its unit.
    :param citation: the publication to cite.
    :param licence: terms of the data.
    :param files: upstream files, in the order in which ``parse`` expects them.
    :param parse: function from the paths of the downloaded files to the arrays; for a folder the path is that of the archive
        of its repository.
    :param sha256: SHA-256 of the npz file from which the digest was computed.
    :param digest: digest of the arrays (see ``_fetch.digest``).
    """

    description: str
    units: Mapping[str, str]
    citation: str
    licence: str
    files: tuple[File, ...]
    parse: Callable[[list[Path]], dict[str, np.ndarray]]
    sha256: str
    digest: str

    @property
    def source(self) -> str:
        """Text with the upstream repositories and paths."""
        by_commit: dict[tuple[str, str], list[str]] = {}
        for file in self.files:
            by_commit.setdefault((file.repository, file.commit[:10]), []).append(file.path)
        return "; ".join(
            f"github.com/{repository} at {commit}: "
            + (", ".join(paths) if len(paths) < 4 else f"{paths[0]} to {paths[-1]} ({len(paths)} files)")
            for (repository, commit), paths in by_commit.items()
        )


def at(repository: str, commit: str, *paths: str) -> tuple[File, ...]:
    """Return files of one commit.

    :param repository: owner and name of the repository.
    :param commit: commit hash.
    :param paths: paths in the repository.

    >>> at("owner/name", "abc", "a.csv", "b.csv")[1].path
    'b.csv'
    """
    return tuple(File(repository, commit, path) for path in paths)
