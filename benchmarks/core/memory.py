"""Memory of this process."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_megabytes(*, of_files: bool = True) -> float:
    """Return the resident set size.

    :param of_files: whether pages of files, such as those of memory-mapped arrays, count.
    :raises ValueError: on an operating system without ``/proc/self/statm``.
    """
    if not _STATM.exists():
        raise ValueError(
            "expected an operating system with /proc/self/statm, such as Linux, got none; run this benchmark there"
        )
    _, resident, shared, *_ = map(int, _STATM.read_text().split())
    return (resident - (0 if of_files else shared)) * os.sysconf("SC_PAGE_SIZE") / 1e6
