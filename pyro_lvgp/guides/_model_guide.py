"""What guides do that run their model at every call."""

from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.util import is_validation_enabled
from pyro.nn import PyroModule
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyro_lvgp.param_store import warn_if_shared


class ModelGuide(AutoGuide):
    """Base of guides that need their model, which copies and pickles come without, as those of Pyro's guides do."""

    @property
    def model(self) -> Any:
        """The model.

        :raises RuntimeError: if the guide is a copy.
        """
        if self._model is None:
            raise RuntimeError(
                f"expected a guide with its model, got a copied or unpickled {type(self).__name__}, which has none; make the "
                "guide of the model anew, call it once and load_state_dict(...) into it"
            )
        return self._model[0]

    def _setup_prototype(self, *args, **kwargs):
        super()._setup_prototype(*args, **kwargs)
        if self.master is None:  # a part of another guide is among its parameters
            prefix, stored = f"{self._pyro_name}.", pyro.get_param_store().get_state()["params"]
            names = [name for name in stored if name.startswith(prefix)]
            theirs = [name for name in names if self._would_take(name.removeprefix(prefix), stored[name])]
            warn_if_shared(type(self).__name__, theirs)

    def _would_take(self, name: str, stored: Tensor) -> bool:
        """Whether a parameter is, or comes to be, under the name of a stored tensor that is not its own."""
        own = dict(self.named_parameters())
        tensor = own.get(name, own.get(f"{name}_unconstrained"))
        # Those of encoders are there before the first call, all others are made by it.
        return "encoders" not in name.split(".") if tensor is None else tensor is not stored

    def _check_order_of_rows(self) -> None:
        """Raise if parameters that are read now would go to other rows than those of their plates.

        Pyro indexes parameters in a plate where it shows fewer rows than all.
        """
        if not is_validation_enabled():
            return
        for plate in _PYRO_STACK:
            if isinstance(plate, pyro.plate) and plate.dim is not None and plate.subsample_size >= plate.size > 0:
                rows = torch.as_tensor(plate._indices)
                if not torch.equal(rows, torch.arange(plate.size, device=rows.device)):
                    raise ValueError(
                        f"expected fewer rows than the {plate.size} of plate {plate.name!r}, or all of them in order, got "
                        f"{len(rows)} in another, which Pyro does not index parameters by: sort them, and the data with them"
                    )

    def __getstate__(self):
        # Pyro's own takes the model from the guide itself, not only from its copy.
        return PyroModule.__getstate__(self) | {"_model": None, "master": None}
