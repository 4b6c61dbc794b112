"""States of the parts of a fit that a checkpoint saves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_lvgp.infer._fit_state import Stateful
from pyro_lvgp.infer._optimizer_state import check_optimizer_state
from pyro_lvgp.infer.optim import JointOptim

__all__ = ["SavedCallbacks", "SavedOptimizer", "SavedRandomState", "SavedTensors"]


@dataclass(frozen=True)
class SavedTensors:
    """Parameters and buffers.

    :param tensors: parameters and buffers by their path in model and guide.

    >>> SavedTensors({"model.x": torch.zeros(2)}).load_state_dict({"model.x": torch.ones(2)})
    """

    tensors: Mapping[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the values by path."""
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ``ValueError`` for values of other tensors.

        :param state: returned by :meth:`state_dict`.
        """
        own = self.tensors
        different = own.keys() ^ state.keys()
        if different := different or {name for name in own if not _alike(own[name], state[name])}:
            raise ValueError(
                f"expected a checkpoint of this model and guide, got one that differs in {sorted(different)}; make them as "
                "they were, or name another file"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Write values into the tensors.

        :param state: returned by :meth:`state_dict`, and checked.
        """
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(state[name])


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


@dataclass(frozen=True)
class SavedOptimizer:
    """State of a Pyro optimiser, by the paths of parameters in model and guide.

    Two instances of a model have different names in Pyro's param store, but the same paths.

    :param optim: the optimiser.
    :param params: unconstrained tensors by path.
    """

    optim: PyroOptim
    params: Mapping[str, Tensor]

    @property
    def kind(self) -> str:
        """Classes of the optimiser, such as ``"JointAdam of Adam"``; only optimisers of these classes can load the state."""
        constructor = self.optim.pt_optim_constructor
        torch_class = constructor if isinstance(constructor, type) else type(constructor)
        return f"{type(self.optim).__name__} of {torch_class.__name__}"

    def state_dict(self) -> dict[str, Any]:
        """Return the states of parameters by path, such as moments and numbers of steps.

        :raises ValueError: if Pyro's own optimisers have parameters without names in the param store.
        """
        if isinstance(self.optim, JointOptim):
            return self.optim.get_state({param: path for path, param in self.params.items()})
        state = self.optim.get_state()
        if None in state:
            raise ValueError(
                "expected parameters with names in Pyro's param store, to save their states, got some without, as under "
                "module_local_params; take pyro_lvgp.infer.JointOptim, which needs no names"
            )
        return {path: state[name] for path, name in self._stored_names().items() if name in state}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` for a state of other parameters.

        :param state: returned by :meth:`state_dict`.
        """
        saved = state["state"] if isinstance(self.optim, JointOptim) else state
        if others := saved.keys() - self.params.keys():
            raise ValueError(
                f"expected a checkpoint of this model and guide, got one that differs in {sorted(others)}; make them as they "
                "were, or name another file"
            )
        for path, value in saved.items():
            # Pyro's optimisers store the state_dict of one optimiser for each parameter.
            own = value if isinstance(self.optim, JointOptim) else value.get("state", {}).get(0, {})
            check_optimizer_state(own, self.params[path], path)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        :param state: returned by :meth:`state_dict`, and checked.
        """
        if isinstance(self.optim, JointOptim):
            self.optim.set_state(state, self.params)
        else:
            names = self._stored_names()
            self.optim.set_state({names[path]: value for path, value in state.items()})

    def _stored_names(self) -> dict[str, Any]:
        """Names in Pyro's param store by path."""
        store = pyro.get_param_store()
        return {path: store.param_name(param) for path, param in self.params.items()}


class SavedCallbacks:
    """States of callbacks by class and position among callbacks of the class.

    Callbacks without a saved state start without one, and saved states of other callbacks are ignored.

    :param callbacks: the callbacks.
    """

    def __init__(self, callbacks: Sequence[Stateful]):
        count, self._callbacks = Counter[str](), dict[str, Stateful]()
        for callback in callbacks:
            name = type(callback).__name__
            self._callbacks[f"{name} {count[name]}"] = callback
            count[name] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks that have one."""
        states = {name: callback.state_dict() for name, callback in self._callbacks.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore states.

        :param state: returned by :meth:`state_dict`.
        """
        for name, callback in self._callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])


class SavedRandomState:
    """Global random state of the CPU and of every GPU in use; states of missing GPUs are ignored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states.

        :param state: returned by :meth:`state_dict`.
        """
        torch.set_rng_state(state["cpu"])
        for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(generator, device)
