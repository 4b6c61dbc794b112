"""What the registry knows of a data set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


class File(NamedTuple):
    """A file, or a folder if ``path`` ends with a slash, of a public GitHub repository at a fixed commit."""

    repository: str
    commit: str
    path: str


@dataclass(frozen=True)
class Entry:
    """One data set.

    :param units: what each array holds, with its unit.
    :param files: upstream files, in the order ``parse`` wants them.
    :param parse: turns the downloaded files into the arrays; for a folder it is given the archive of the repository.
    :param sha256: of the npz file with which the digest was computed.
    :param digest: of the arrays (see ``_fetch.digest``).
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
        """The upstream repositories and paths, in words."""
        by_commit: dict[tuple[str, str], list[str]] = {}
        for file in self.files:
            by_commit.setdefault((file.repository, file.commit[:10]), []).append(file.path)
        return "; ".join(
            f"github.com/{repository} at {commit}: "
            + (", ".join(paths) if len(paths) < 4 else f"{paths[0]} to {paths[-1]} ({len(paths)} files)")
            for (repository, commit), paths in by_commit.items()
        )


def at(repository: str, commit: str, *paths: str) -> tuple[File, ...]:
    """Files of one commit.

    >>> at("owner/name", "abc", "a.csv", "b.csv")[1].path
    'b.csv'
    """
    return tuple(File(repository, commit, path) for path in paths)
