"""State of a fit of a linear GP-VAE between two sweeps, and its file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Gamma

from pyro_lvgp.conjugate.linear_decoder import DecoderFactors
from pyro_lvgp.infer.callbacks._fingerprint import digest
from pyro_lvgp.infer.callbacks._state_file import read_states, write_states

__all__ = ["Ascent", "AscentFile", "pack_factors", "unpack_factors"]

_GAMMAS = ("relevance", "noise", "row_scale")
_TENSORS = ("mean", "covariance", "dof")
_PARTS = ("fit", "state", "bounds", "kernel", "optim")  # of a file


def pack_factors(q: DecoderFactors) -> dict[str, Tensor]:
    """Return the tensors of factors by name.

    :param q: the factors.
    """
    gammas = {f"{name}.{part}": getattr(getattr(q, name), part) for name in _GAMMAS for part in ("concentration", "rate")}
    return {name: getattr(q, name) for name in _TENSORS} | gammas


def unpack_factors(tensors: Mapping[str, Tensor]) -> DecoderFactors:
    """Return the factors of the tensors.

    :param tensors: returned by :func:`pack_factors`.
    """
    relevance, noise, row_scale = (
        Gamma(tensors[f"{name}.concentration"], tensors[f"{name}.rate"], validate_args=False) for name in _GAMMAS
    )
    return DecoderFactors(tensors["mean"], tensors["covariance"], relevance, noise, row_scale, tensors["dof"])


class Ascent(NamedTuple):
    """State of over-relaxed coordinate ascent.

    :param q: factors of the next sweep.
    :param updated: factors after the last updates, without over-relaxation.
    :param step: length of the next step.
    :param best: bound of the last sweep.
    """

    q: DecoderFactors
    updated: DecoderFactors
    step: float = 1.0
    best: float = -torch.inf


class AscentFile:
    """File of the state of a fit, from which the fit continues.

    :param path: name of the file.
    :param every: number of sweeps between two writes.
    :param settings: data and settings of the fit, which must be those of the file.
    :param kernel: the kernel, whose parameters are stored; None without one.
    :param optim: its optimiser; None without one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int,
        settings: Mapping[str, Any],
        kernel: nn.Module | None,
        optim: torch.optim.Optimizer | None,
    ):
        self._path, self._every, self._digest = Path(path), every, digest(dict(settings))
        self._kernel, self._optim = kernel, optim

    def read(self) -> tuple[Ascent, list[float]] | None:
        """Restore the kernel and its optimiser, and return the state and the bounds of all sweeps; None without a file.

        :raises ValueError: for a file that cannot be read, was damaged, or is of a fit with other data or settings.
        """
        if not self._path.exists():
            return None
        content = read_states(self._path, _PARTS)
        if content["fit"] != self._digest:
            raise ValueError(
                f"expected a checkpoint of this fit in {self._path}, got one of other data or settings; name another file, or "
                "remove this one to start anew"
            )
        if self._kernel is not None:
            self._kernel.load_state_dict(content["kernel"])
        if self._optim is not None:
            self._optim.load_state_dict(content["optim"])
        state = content["state"]
        q, updated = (unpack_factors(state[name]) for name in ("q", "updated"))
        return Ascent(q, updated, state["step"], state["best"]), content["bounds"]

    def write(self, ascent: Ascent, bounds: list[float]) -> None:
        """Write the state after every so many sweeps.

        :param ascent: the state before the next sweep.
        :param bounds: bounds of all sweeps.
        :raises OSError: if the file cannot be written; the old file then is as it was.
        """
        if len(bounds) % self._every:
            return
        packed = ascent._asdict() | {name: pack_factors(getattr(ascent, name)) for name in ("q", "updated")}
        content = {
            "fit": self._digest,
            "state": packed,
            "bounds": bounds,
            "kernel": {} if self._kernel is None else self._kernel.state_dict(),
            "optim": {} if self._optim is None else self._optim.state_dict(),
        }
        write_states(self._path, content)
