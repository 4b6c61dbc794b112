"""Files that are complete or absent."""

from collections.abc import Callable
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a new file, which then replaces the one at ``path``; if that fails, the old one is as it was.

    :param path: name of the file.
    :param write: function that writes to a file of the name that it is given.
    :raises OSError: if the file cannot be written.
    :raises RuntimeError: as raised by the function, such as torch's writer where the disk is full.
    """
    unfinished = Path(f"{path}.unfinished")
    try:
        write(unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError):
        unfinished.unlink(missing_ok=True)
        raise
