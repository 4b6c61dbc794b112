"""What guides do that run their model at every call."""

from typing import Any

import pyro
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule

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
            stored = [name for name in pyro.get_param_store() if name.startswith(f"{self._pyro_name}.")]
            warn_if_shared(type(self).__name__, stored)

    def __getstate__(self):
        # Pyro's own takes the model from the guide itself, not only from its copy.
        return PyroModule.__getstate__(self) | {"_model": None, "master": None}
