"""Modules that do not use Pyro's param store when they are called outside models and guides."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pyro.poutine.runtime import am_i_wrapped
from torch import nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.unique_names import UniquelyNamed


class StandaloneModule(UniquelyNamed, metaclass=AbstractModuleMeta):
    """Base class of submodules of models that can be called outside models as well.

    A call of a ``PyroModule`` registers its parameters in Pyro's param store under their names in its root module.  A call of
    a module of this class outside any model, guide or Pyro handler reads the module's own parameters instead.  In a model
    that is a function, names of its parameters begin with a unique name, such as ``Gaussian_2.variance``.  A module that is
    constructed in such a model has the names of Pyro, by which the next run of the model finds its parameters again.

    >>> import pyro, torch
    >>> from pyro.nn import PyroParam
    >>> class Scale(StandaloneModule):
    ...     def __init__(self, scale):
    ...         super().__init__()
    ...         self.scale = PyroParam(torch.tensor(scale))
    ...
    ...     def forward(self, x):
    ...         return self.scale * x
    >>> [Scale(scale)(1.0).item() for scale in (2.0, 3.0)]
    [2.0, 3.0]
    """

    def _take_name(self) -> None:
        if self._outside_pyro():
            super()._take_name()

    def __del__(self) -> None:
        if getattr(self, "_pyro_name", ""):  # otherwise the parameters are those of the next run too
            super().__del__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs) if self._outside_pyro() else super().__call__(*args, **kwargs)

    def _outside_pyro(self) -> bool:
        """Return whether no model, guide or Pyro handler is active."""
        return not (self._pyro_context.active or am_i_wrapped())

    def _reading_params(self) -> AbstractContextManager[Any]:
        """Context in which parameters are read in the same way as in a call of the module."""
        return nullcontext() if self._outside_pyro() else self._pyro_context
