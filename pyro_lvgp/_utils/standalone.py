"""Modules that do not touch Pyro's global parameter store when they are called by themselves."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pyro.nn import PyroModule
from pyro.poutine.runtime import am_i_wrapped
from torch import nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta


class StandaloneModule(PyroModule, metaclass=AbstractModuleMeta):
    """Part of models that is also a plain function of its own parameters.

    A call of a ``PyroModule`` registers its parameters in Pyro's global store under their names in its root module.  Modules
    without an owner have names such as ``variance`` there, so that two of them would share one tensor.  A call of this module
    outside any model, guide or Pyro handler reads the module's own parameters instead.

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(self, *args, **kwargs) if self._outside_pyro() else super().__call__(*args, **kwargs)

    def _outside_pyro(self) -> bool:
        """Return whether no model, guide or Pyro handler is active."""
        return not (self._pyro_context.active or am_i_wrapped())

    def _reading_params(self) -> AbstractContextManager[Any]:
        """Context in which attributes are read as in a call of the module."""
        return nullcontext() if self._outside_pyro() else self._pyro_context
