"""Base class of guides that need their model at every call."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.util import is_validation_enabled
from pyro.nn import PyroModule
from pyro.poutine.runtime import get_plates
from torch import Tensor

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.unique_names import UniquelyNamed
from pyro_lvgp.guides._handlers import plate_indices
from pyro_lvgp.infer.protocols import HasPlates

_MEMBERS_OF_MODULES = frozenset(dir(PyroModule))


class ModelGuide(UniquelyNamed, AutoGuide, metaclass=AbstractModuleMeta):
    """Base of guides that need their model at every call.

    The first call makes ``prototype_trace``, and then parameters by ``_make_parameters``; if it raises, the next call is
    the first.  Copies and pickles come without the model, as those of Pyro's guides do.

    You implement ``forward``.

    :param model: a Pyro model.
    :param create_plates: as for Pyro's autoguides.
    """

    prototype_trace: Any

    def __init__(self, model: Callable[..., Any], *, create_plates: Callable[..., Any] | None = None):
        super().__init__(model, create_plates=create_plates)
        self.plates: dict[str, pyro.plate] = {}

    @abstractmethod
    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        """Sample all latent sites.

        :param args: arguments of the model.
        :returns: values by site.
        """

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
        """Raise if a site has the name of a method of modules, which would hide a parameter of that name."""
        for name, _ in self.prototype_trace.iter_stochastic_nodes():
            if taken := [part for part in name.split(".") if part in _MEMBERS_OF_MODULES]:
                raise ValueError(
                    f"expected names of sites other than those of methods of modules, got {taken[0]!r}; rename the site"
                )

    def _make_parameters(self, *args, **kwargs) -> None:
        """Make the parameters that depend on the prototype.

        :param args: arguments of the model.
        """

    def _check_order_of_rows(self) -> None:
        """Raise if an open plate has all rows in another order than the parameters of the guide.

        Pyro indexes parameters in a plate only if the plate shows fewer rows than all.
        """
        if not is_validation_enabled():
            return
        indices = {**{name: plate._indices for name, plate in self.plates.items()}, **plate_indices()}
        for frame in get_plates():
            # Plates of draws, which the guide did not see created, have their rows in order.
            size = frame.full_size or frame.size
            if frame.dim is None or frame.name not in indices or frame.size < size:
                continue
            rows = torch.as_tensor(indices[frame.name])
            if not torch.equal(rows, torch.arange(size, device=rows.device)):
                raise ValueError(
                    f"expected fewer rows than the {size} of plate {frame.name!r}, or all of them in order, got "
                    f"{len(rows)} in another, which Pyro does not index parameters by: sort them, and the data with them"
                )

    def __getstate__(self):
        # Pyro's own takes the model from the guide itself, not only from its copy.
        return PyroModule.__getstate__(self) | {"_model": None, "master": None}


def plates_of(model: Callable[..., Any]) -> Callable[..., Any] | None:
    """The ``create_plates`` of a model, if it has one."""
    return model.create_plates if isinstance(model, HasPlates) else None
