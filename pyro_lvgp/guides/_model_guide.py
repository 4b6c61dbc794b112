"""Base class of guides that need their model at every call."""

import pickle
from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from operator import attrgetter
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.util import is_validation_enabled
from pyro.nn import PyroModule
from pyro.poutine import Trace
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.unique_names import UniquelyNamed
from pyro_lvgp.guides._handlers import plate_indices
from pyro_lvgp.infer.protocols import HasPlates
from pyro_lvgp.networks.pyro_module import adopt

_MEMBERS_OF_MODULES = frozenset(dir(PyroModule))


class ModelGuide(UniquelyNamed, AutoGuide, metaclass=AbstractModuleMeta):
    """Base of guides that need their model at every call.

    The first call traces the model as ``prototype_trace``, and then makes the parameters by ``_make_parameters``.  If one of
    the two raises, the guide is as before the call.  Copies and pickles of a guide contain its model, unlike those of Pyro's
    guides; pickles leave out a model that pickle refuses, such as a function in a function.

    Subclasses implement :meth:`forward` and :meth:`quantiles`.

    :param model: a Pyro model.
    :param encoders: modules by site, from data to loc and scale; None for a site with parameters of its own.
    :param create_plates: as for Pyro's autoguides.
    :raises TypeError: for a class of models.
    """

    prototype_trace: Any
    argument_shapes: tuple[tuple[int, ...] | None, ...] | None = None
    """Shapes of the tensors among the positional arguments of the first call, and None for others; None before the call."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        encoders: Mapping[str, nn.Module | None] | None = None,
        create_plates: Callable[..., Any] | None = None,
    ):
        unwrapped = poutine.unwrap(model)
        if isinstance(unwrapped, type):
            raise TypeError(f"expected a model, got the class {unwrapped.__name__}; construct the model first")
        super().__init__(model, create_plates=create_plates)
        self._model: Any = ModelOfGuide((model,))
        self.plates: dict[str, pyro.plate] = {}
        self.encoders = PyroModule()
        amortised = {name: encoder for name, encoder in (encoders or {}).items() if encoder is not None}
        for name, encoder in amortised.items():
            adopt(self.encoders, name, encoder)
        self._encoded = frozenset(amortised)

    @abstractmethod
    def forward(self, *args, **kwargs) -> dict[str, Tensor]:
        """Sample all latent sites.

        :param args: arguments of the model.
        :returns: values by site.
        """

    @abstractmethod
    def quantiles(self, quantiles: list[float] | Tensor, *args, **kwargs) -> dict[str, Tensor]:
        """Compute marginal posterior quantiles by site, along a new first dimension.

        :param quantiles: probabilities between 0 and 1.
        :param args: arguments of the model.
        """

    @torch.no_grad()
    @pyro_lock
    def median(self, *args, **kwargs) -> dict[str, Tensor]:
        """Compute posterior medians by site.

        :param args: arguments of the model, which encoders and chains need.
        :param kwargs: keyword arguments of :meth:`quantiles`.
        """
        return {name: value[0] for name, value in self.quantiles([0.5], *args, **kwargs).items()}

    def encoder_of(self, site: str) -> nn.Module | None:
        """Return the encoder of a site; None if the site has parameters of its own.

        :param site: name of the site.
        """
        return attrgetter(site)(self.encoders) if site in self._encoded else None

    def _encode(self, name: str, y: Any) -> tuple[Tensor, Tensor]:
        """Compute loc and scale of an encoded site."""
        encoding = attrgetter(name)(self.encoders)(y)
        if not isinstance(encoding, tuple | list) or len(encoding) != 2:
            raise TypeError(
                f"expected loc and scale from the encoder of {name!r}, got {type(encoding).__name__}; an IndexNet returns both"
            )
        loc, scale = encoding
        return loc, scale

    @property
    def model(self) -> Any:
        """Model of the guide.

        :raises RuntimeError: if the guide was pickled, and pickle refuses the model.
        """
        (model,) = self._model
        if model is None:
            raise RuntimeError(
                f"expected a guide with its model, got an unpickled {type(self).__name__} without, since pickle refuses the "
                "model; define it at the top level of a module, or make a new guide of the model, call it once, and load the "
                "state with load_state_dict(...)"
            )
        return model

    def _setup_prototype(self, *args, **kwargs):
        if self.prototype_trace is None and self.argument_shapes is not None:  # a copy, which has the parameters
            with seeded(0):  # draws of the prototype are none of the guide's
                self._trace_prototype(*args, **kwargs)
            return
        try:
            self._trace_prototype(*args, **kwargs)
            self._check_names()
            self._make_parameters(*args, **kwargs)
        except BaseException:
            self.prototype_trace = self.argument_shapes = None
            raise
        self.argument_shapes = tuple(tuple(arg.shape) if torch.is_tensor(arg) else None for arg in args)

    def _trace_prototype(self, *args, **kwargs) -> None:
        """Trace the model as ``prototype_trace``, and record its plates.

        :param args: arguments of the model.
        """
        super()._setup_prototype(*args, **kwargs)

    def _check_names(self) -> None:
        """Raise if a site has the name of a method of modules, which would hide a parameter of that name."""
        for name, _ in self.prototype_trace.iter_stochastic_nodes():
            if taken := [part for part in name.split(".") if part in _MEMBERS_OF_MODULES]:
                raise ValueError(
                    f"expected names of sites other than those of methods of modules, got {taken[0]!r}; rename the site"
                )

    def _check_prototype(self, part_trace: Trace) -> None:
        """Accept the prototype of a part; Pyro's autoguides call this method of the guide that contains them."""

    def _check_is_called(self) -> None:
        """Raise before the first call."""
        if self.prototype_trace is None:
            raise ValueError(
                "expected a guide that was called before, got one that has no parameters before its first call; fit the "
                "guide, or call guide(*args) once"
            )

    def _make_parameters(self, *args, **kwargs) -> None:
        """Make the parameters, whose shapes depend on the prototype.

        :param args: arguments of the model.
        """

    def _check_order_of_rows(self) -> None:
        """Raise if an active plate has all rows in another order than the parameters of the guide.

        Pyro indexes parameters in a plate only if the plate is subsampled to fewer rows than all.
        """
        if not is_validation_enabled():
            return
        indices = {**{name: plate._indices for name, plate in self.plates.items()}, **plate_indices()}
        for frame in get_plates():
            # Plates over draws are not among the indices; their rows are in order.
            size = frame.full_size or frame.size
            if frame.dim is None or frame.name not in indices or frame.size < size:
                continue
            rows = torch.as_tensor(indices[frame.name])
            if not torch.equal(rows, torch.arange(size, device=rows.device)):
                raise ValueError(
                    f"expected fewer rows than the {size} of plate {frame.name!r}, or all of them in order, got "
                    f"all {len(rows)} in another order, by which Pyro does not index parameters; sort the rows and their data"
                )

    def __getstate__(self):
        # AutoGuide.__getstate__ would remove the model.
        return PyroModule.__getstate__(self) | {"master": None}


class ModelOfGuide(tuple[Any]):
    """Tuple of a model, which is no submodule of the guide in an attribute of which it is.

    Copies contain a copy of the model, and so do pickles, or None in its place if pickle refuses the model.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelOfGuide":
        return ModelOfGuide((deepcopy(self[0], memo),))

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self[0])
        except (pickle.PicklingError, AttributeError, TypeError):
            return ModelOfGuide, ((None,),)
        return ModelOfGuide, (tuple(self),)


def plates_of(model: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the ``create_plates`` of a model; None if the model has none."""
    return model.create_plates if isinstance(model, HasPlates) else None
