"""Checkpoints of a fit in a file, and exact resumption."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.interrupts import uninterrupted
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._fit_state import FitState, Stateful
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.callbacks._fingerprint import SavedFingerprint
from pyro_lvgp.infer.callbacks._saved_parts import SavedCallbacks, SavedOptimizer, SavedRandomState, SavedTensors
from pyro_lvgp.infer.callbacks._state_file import read_states, write_states
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Save the state of a fit to a file at regular intervals, and resume from the file if it exists.

    If a script is run again after it was killed, its fit takes the remaining steps, with the mini-batches and random numbers
    of an uninterrupted fit.  The file contains the state that changes during a fit, and a fingerprint of data, structure of
    model and guide, seed, bound and optimiser; the script makes all of these anew, and the callbacks.  To continue
    beyond the last step, increase ``num_steps``; to start again, remove the file.  A file written with a GPU can be read
    without one, but the later random numbers differ.

    :param path: path of the file; with several processes each has its own file, with its rank at the end of the name.
    :param every: number of steps between two saves.  The state after the last step or after Ctrl-C is saved too.
    :raises ValueError: if ``every`` is below 1, or the folder of the file does not exist; at the start of a fit, if the file
        cannot be read, was damaged, or is of a fit with other data or settings, which the error names.
    :raises OSError: if the file cannot be written; the last one then is as it was.
    :raises RuntimeError: at the start of a fit in several processes, if their files are of different steps.

    >>> import tempfile
    >>> import torch
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> from pyro_lvgp.infer import fit
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide = MeanFieldGuide(model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     callbacks = [Checkpoint(f"{folder}/fit.pt", every=10)]
    ...     history = fit(model, guide, Y, num_steps=3, callbacks=callbacks, progress=False)
    ...     history = fit(model, guide, Y, num_steps=5, callbacks=callbacks, progress=False)  # two more steps
    >>> len(history.losses)
    5
    """

    order = 2

    @names_types
    def __init__(self, path: str | os.PathLike[str], *, every: int = 100):
        check_sizes(every=every)
        if not (folder := Path(path).absolute().parent).is_dir():
            raise ValueError(f"expected a checkpoint in a folder that exists, got {os.fspath(path)}; make {folder} first")
        self.path, self.every = Path(path), every

    def on_start(self, state: FitState) -> None:
        """Restore the state of the fit if there is a file.

        :param state: the fit.
        """
        processes = state.processes
        self._own_path = self.path if processes.size == 1 else Path(f"{self.path}.{processes.rank}")
        self._fingerprint: SavedFingerprint | None = None
        if self._own_path.exists():
            state.initialize_parameters()
            with uninterrupted():  # so that all parts are those of the file, or none
                self._read(self._parts(state))
        if processes.any(processes.mean(float(state.step)) != state.step):
            raise RuntimeError(
                f"expected checkpoints of one step in all processes, got one of step {state.step} here; remove them"
            )

    def on_step(self, state: FitState) -> None:
        """Save the state after every ``every`` steps, and when the fit ends.

        :param state: the fit.
        """
        if state.is_finished or state.step % self.every == 0:
            states: dict[str, Any] = {name: part.state_dict() for name, part in self._parts(state).items()}
            write_states(self._own_path, states)

    def _parts(self, state: FitState) -> dict[str, Stateful]:
        if self._fingerprint is None:  # guides make modules at the first step
            self._fingerprint = SavedFingerprint(state)
        return _parts(state) | {"fingerprint": self._fingerprint}

    def _read(self, parts: Mapping[str, Stateful]) -> None:
        states = read_states(self._own_path, parts)
        for name in sorted(parts, key=lambda name: name != "tensors"):  # other parts depend on the tensors
            if isinstance(part := parts[name], _Checked):
                part.check_state(states[name])
        for name, part in parts.items():
            part.load_state_dict(states[name])


@runtime_checkable
class _Checked(Protocol):
    """Part that checks a state before any part is loaded."""

    def check_state(self, state: Any) -> None:
        """Raise if the state is one of another fit."""
        ...


def _parts(state: FitState) -> dict[str, Stateful]:
    """Return the parts of a fit by name; parts that may refuse a state are loaded before model and guide change."""
    parts: dict[str, Any] = {"batches": state.batches}
    if isinstance(state.svi, BlockCoordinateVI):
        parts["blocks"] = state.svi
    else:
        optimizer = SavedOptimizer(state.svi.optim, state.parameters())
        parts[optimizer.kind] = optimizer
    return parts | {
        "tensors": SavedTensors(state.tensors()),
        "history": state.history,
        "callbacks": SavedCallbacks(state.callbacks),
        "random": SavedRandomState(),
    }
