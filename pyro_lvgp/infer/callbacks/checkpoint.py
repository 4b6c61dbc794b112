"""States of a fit in a file, to go on from after whatever ended it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._parameters import find_parameters


@runtime_checkable
class Stateful(Protocol):
    """What has a state."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A file to which :func:`~pyro_lvgp.infer.fit` writes its state, and from which it goes on if there is one.

    Run a script again that was killed, and its fit takes the steps that are left, with the mini-batches and random numbers
    that it would have had.  All that does not change is made by the script: models, guides, data, settings.  To go on
    beyond the last step, raise ``num_steps``; to start anew, remove the file.  What was written with a GPU can be read
    without one; its random numbers are others from there on.

    :param path: of the file; of several processes each has one of its own, with its rank at the end of the name.
    :param every: steps between two writings.  The state after the last step is written too, and that at Ctrl-C.
    :raises ValueError: if ``every`` is below 1, or the folder of the file does not exist.

    >>> import tempfile
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> from pyro_lvgp.infer import fit
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide = MeanFieldGuide(model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint = Checkpoint(f"{folder}/fit.pt", every=10)
    ...     history = fit(model, guide, Y, num_steps=3, checkpoint=checkpoint, progress=False)
    ...     history = fit(model, guide, Y, num_steps=5, checkpoint=checkpoint, progress=False)  # two steps more
    >>> len(history.losses)
    5
    """

    path: str | os.PathLike[str]
    every: int = 100

    def __post_init__(self) -> None:
        check_sizes(every=self.every)
        if not (folder := Path(self.path).absolute().parent).is_dir():
            raise ValueError(f"expected a checkpoint in a folder that exists, got {os.fspath(self.path)}; make {folder} first")

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        return Path(self.path).exists()

    def write(self, parts: Mapping[str, Stateful]) -> None:
        """Put the states of all parts in the file, in the place of what it held.

        :param parts: by name.
        """
        unfinished = Path(f"{os.fspath(self.path)}.unfinished")
        torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
        unfinished.replace(self.path)

    def read(self, parts: Mapping[str, Stateful]) -> None:
        """Give all parts the states in the file.

        :param parts: by name.
        :raises ValueError: if the file cannot be read, or holds states of other parts.
        """
        path = os.fspath(self.path)
        try:
            states = torch.load(path, map_location=None if torch.cuda.is_available() else "cpu")
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(
                f"expected the states of a fit in {path}, got what cannot be read ({type(error).__name__}); name another "
                "file, or remove this one to start anew"
            ) from error
        if not isinstance(states, Mapping) or states.keys() != parts.keys():
            found = sorted(states) if isinstance(states, Mapping) else type(states).__name__
            raise ValueError(
                f"expected the states of a fit in {path}, which are {sorted(parts)}, got {found}; set up the fit as it was, "
                "or name another file"
            )
        for name, part in parts.items():
            part.load_state_dict(states[name])


class Tensors:
    """Parameters and buffers of a model and a guide.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param example: makes arguments to call both with, to find them.
    """

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], example: Callable[[], tuple[Tensor, ...]]):
        self._model, self._guide, self._example = model, guide, example

    def state_dict(self) -> dict[str, Tensor]:
        """Values by name."""
        return {name: tensor.detach() for name, tensor in self._named().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Write values into the tensors.

        :param state: what :meth:`state_dict` returned.
        :raises ValueError: if these are other tensors.
        """
        own = self._named()
        if others := own.keys() ^ state.keys() or {name for name in own if not _alike(own[name], state[name])}:
            raise ValueError(
                f"expected a checkpoint of this model and guide, got one that differs in {sorted(others)}; make them as they "
                "were, or name another file"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        found = find_parameters(self._model, self._guide, self._example(), {})
        return {name: parameter.tensor for name, parameter in found.items()}

    def _named(self) -> dict[str, Tensor]:
        tensors = dict(self._parameters)
        for prefix, part in (("model", self._model), ("guide", self._guide)):
            if isinstance(part, nn.Module):
                tensors |= {f"{prefix}.{name}": buffer for name, buffer in part.named_buffers()}
        return tensors


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


@dataclass(frozen=True)
class OptimizerState:
    """The state of Pyro's optimisers.

    :param optim: what has them.
    """

    optim: PyroOptim

    @property
    def kind(self) -> str:
        """Which optimisers these are, such as ``"JointOptim of Adam"``, of which others do not know the states."""
        constructor = self.optim.pt_optim_constructor
        return f"{type(self.optim).__name__} of {getattr(constructor, '__name__', type(constructor).__name__)}"

    def state_dict(self) -> dict[str, Any]:
        """Moments, numbers of steps, …

        :raises ValueError: if Pyro's own optimisers have parameters without names, of which they keep one state for all.
        """
        state = self.optim.get_state()
        if None in state:
            raise ValueError(
                "expected parameters with names in Pyro's param store, to know their states again, got some without, as under "
                "module_local_params; take pyro_lvgp.infer.JointOptim, which knows them by their values"
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        :param state: what :meth:`state_dict` returned.
        """
        self.optim.set_state(state)


class RandomState:
    """The global random state, on the CPU and every GPU in use; of GPUs that are not there it is let go."""

    def state_dict(self) -> dict[str, Any]:
        """Of all generators."""
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        :param state: what :meth:`state_dict` returned.
        """
        torch.set_rng_state(state["cpu"])
        for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(generator, device)
