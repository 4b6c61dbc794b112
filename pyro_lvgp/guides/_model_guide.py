"""What guides do that run their model at every call."""

from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.util import is_validation_enabled
from pyro.nn import PyroModule
from pyro.poutine.runtime import _PYRO_STACK

from pyro_lvgp._utils.unique_names import UniquelyNamed


class ModelGuide(UniquelyNamed, AutoGuide):
    """Base of guides that need their model, which copies and pickles come without, as those of Pyro's guides do.

    The first call makes ``prototype_trace``, and then parameters by ``_make_parameters``; if it fails, the next one is first.
    """

    prototype_trace: Any

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
        try:
            super()._setup_prototype(*args, **kwargs)
            self._check_names()
            self._make_parameters(*args, **kwargs)
        except BaseException:
            self.prototype_trace = None
            raise

    def _check_names(self) -> None:
        """Raise if parameters under the name of a site would stand behind a method of the module that holds them."""
        for name, _ in self.prototype_trace.iter_stochastic_nodes():
            if taken := [part for part in name.split(".") if hasattr(PyroModule, part)]:
                raise ValueError(
                    f"expected names of sites other than those of methods of modules, got {taken[0]!r}; rename the site"
                )

    def _make_parameters(self, *args, **kwargs) -> None:
        """Make the parameters that the prototype asks for, if there are any; called with the arguments of the model."""

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
