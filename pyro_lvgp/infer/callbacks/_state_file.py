"""Files of the state of a fit, with a digest, that are complete or absent."""

import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pyro_lvgp._utils.files import replace_file
from pyro_lvgp._utils.interrupts import uninterrupted
from pyro_lvgp.infer.callbacks._fingerprint import digest

__all__ = ["read_states", "write_states"]

_DIGEST = "digest"


def write_states(path: Path, states: Mapping[str, Any]) -> None:
    """Write to a new file, which then replaces the last one; Ctrl-C is deferred to the end.

    :param path: name of the file.
    :param states: states of the parts of a fit, by name.
    :raises OSError: if the file cannot be written; the last one then is as it was.
    """
    with uninterrupted():
        try:
            replace_file(path, partial(torch.save, {_DIGEST: digest(states), **states}))
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where the disk is full
            raise OSError(
                f"expected to write a checkpoint to {path}, got an error ({error}); the last checkpoint is as it was: make "
                "room on the disk, or name a file on another"
            ) from error


def read_states(path: Path, names: Collection[str]) -> dict[str, Any]:
    """Return the states of a file, without running code of it.

    :param path: name of the file.
    :param names: names of the parts that it must have.
    :raises ValueError: for a file that cannot be read, has other parts, or was damaged.
    """
    try:
        states = torch.load(os.fspath(path), map_location=None if torch.cuda.is_available() else "cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"expected the states of a fit in {path}, got a file that cannot be read ({type(error).__name__}); name another "
            "file, or remove this one to start anew"
        ) from error
    if not isinstance(states, Mapping) or states.keys() != {_DIGEST, *names}:
        found = sorted(states) if isinstance(states, Mapping) else type(states).__name__
        raise ValueError(
            f"expected the states of a fit in {path}, which are {sorted(names)}, got {found}; set up the fit as it was, or "
            "name another file"
        )
    states = dict(states)
    if states.pop(_DIGEST) != digest(states):
        raise ValueError(
            f"expected the states of a fit in {path}, got a file that was changed since it was written, or damaged; take a "
            "copy of the file, or remove this one to start anew"
        )
    return states
