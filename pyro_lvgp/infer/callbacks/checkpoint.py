"""Checkpoints of a fit in a file, and exact resumption."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._fit_state import FitState, Stateful
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.callbacks._saved_parts import SavedCallbacks, SavedOptimizer, SavedRandomState, SavedTensors
from pyro_lvgp.infer.callbacks.base import Callback

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Save the state of a fit to a file at regular intervals, and resume from the file if it exists.

    If a script is run again after it was killed, its fit takes the remaining steps, with the mini-batches and random numbers
    of an uninterrupted fit.  The file contains the state that changes during a fit; the script makes model, guide, data,
    settings and callbacks.  To continue beyond the last step, increase ``num_steps``; to start again, remove the file.  A file
    written with a GPU can be read without one, but the later random numbers differ.

    :param path: path of the file; with several processes each has its own file, with its rank at the end of the name.
    :param every: number of steps between two saves.  The state after the last step or after Ctrl-C is saved too.
    :raises ValueError: if ``every`` is below 1, or the folder of the file does not exist; at the start of a fit, if the file
        cannot be read or is of another fit.
    :raises RuntimeError: at the start of a fit in several processes, if their files are of different steps.

    >>> import tempfile
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
        if self._own_path.exists():
            state.initialize_parameters()
            self._read(_parts(state))
        if processes.any(processes.mean(float(state.step)) != state.step):
            raise RuntimeError(
                f"expected checkpoints of one step in all processes, got one of step {state.step} here; remove them"
            )

    def on_step(self, state: FitState) -> None:
        """Save the state after every ``every`` steps, and when the fit ends.

        :param state: the fit.
        """
        if state.is_finished or state.step % self.every == 0:
            unfinished = Path(f"{self._own_path}.unfinished")
            torch.save({name: part.state_dict() for name, part in _parts(state).items()}, unfinished)
            unfinished.replace(self._own_path)

    def _read(self, parts: Mapping[str, Stateful]) -> None:
        path = os.fspath(self._own_path)
        try:
            states = torch.load(path, map_location=None if torch.cuda.is_available() else "cpu")
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(
                f"expected the states of a fit in {path}, got a file that cannot be read ({type(error).__name__}); name "
                "another file, or remove this one to start anew"
            ) from error
        if not isinstance(states, Mapping) or states.keys() != parts.keys():
            found = sorted(states) if isinstance(states, Mapping) else type(states).__name__
            raise ValueError(
                f"expected the states of a fit in {path}, which are {sorted(parts)}, got {found}; set up the fit as it was, "
                "or name another file"
            )
        for name, part in parts.items():
            part.load_state_dict(states[name])


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
