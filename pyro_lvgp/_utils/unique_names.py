"""Unique names of modules in Pyro's param store, so that no two of them share parameters by accident."""

import weakref
from types import TracebackType
from typing import Any

import pyro
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor

from pyro_lvgp._utils.representation import Represented

__all__ = ["UniquelyNamed", "take_unique_name"]

_OWNERS: dict[str, weakref.ReferenceType[PyroModule]] = {}
_OF_DELETED_MODULES: list[weakref.ReferenceType[Tensor]] = []


class UniquelyNamed(Represented, PyroModule):
    """Base class of modules whose parameters have unique names in Pyro's param store.

    Pyro stores parameters by name, so that two modules of one class would share parameters of equal names.  The parameters of
    the first instance of a subclass have names such as ``BayesianGPLVM.kernel.variance``, and those of a second instance names
    such as ``BayesianGPLVM_2.kernel.variance``.  Names of sample sites, such as ``kernel.variance`` with a prior, have no such
    prefix.  Copies and unpickled modules have unique names as well.  The name of a submodule is its path in the root module,
    as in Pyro.  Parameters of deleted modules are removed from the store when the next module is created; values that were
    loaded into the store since then stay.

    >>> first, second = UniquelyNamed(), UniquelyNamed()
    >>> first._pyro_name, second._pyro_name
    ('UniquelyNamed', 'UniquelyNamed_2')
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_name()

    def _take_name(self) -> None:
        take_unique_name(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        context = self._pyro_context
        if isinstance(context, _RootContext) and context.name == self._pyro_name:  # not a part of another module
            self._take_name()

    def __del__(self) -> None:
        if "_parameters" in self.__dict__:  # otherwise the constructor failed
            _OF_DELETED_MODULES.extend(map(weakref.ref, self.parameters()))


def take_unique_name(module: PyroModule, *, only_in_pyro: bool = False) -> None:
    """Give a module and its parts a name that no other module has.

    :param module: the module.
    :param only_in_pyro: whether calls outside models, guides and Pyro's handlers leave the param store alone.
    """
    name = _unused_name(type(module).__name__)
    _OWNERS[name] = weakref.ref(module)
    context = _IdleOutsidePyro(name) if only_in_pyro else _RootContext(name)
    for path, part in module.named_modules(prefix=name):
        if isinstance(part, PyroModule):
            part._pyro_name, part._pyro_context = path, context


class _RootContext(_Context):
    """Context of a module's call that removes the name of the module from the names of sample sites.

    :param name: name of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        # Pyro sets this at construction if module_local_params is on, but the setting may differ when a copy is called.
        self.param_state: Any = {"params": {}, "constraints": {}}
        self._without_prefix = _WithoutPrefix(f"{name}.")

    def __enter__(self) -> None:
        if not self.active:
            self._without_prefix.__enter__()
        super().__enter__()

    def __exit__(self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        super().__exit__(type, value, traceback)
        if not self.active:
            self._without_prefix.__exit__(type, value, traceback)


class _IdleOutsidePyro(_RootContext):
    """Context that is active in models, guides and Pyro's handlers alone, so that other calls read a module's own parameters.

    :param name: name of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._entered: list[bool] = []

    def __enter__(self) -> None:
        self._entered.append(bool(self.active) or am_i_wrapped())
        if self._entered[-1]:
            super().__enter__()

    def __exit__(self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._entered.pop():
            super().__exit__(type, value, traceback)


class _WithoutPrefix(Messenger):
    """Remove a prefix from the names of sample sites."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def _pyro_sample(self, msg: Any) -> None:
        msg["name"] = msg["name"].removeprefix(self._prefix)


def _unused_name(class_name: str) -> str:
    """Class name, with the smallest suffix ``_2``, ``_3``, … that makes it unique if another module has the name."""
    _remove_parameters_of_deleted_modules()
    name, number = class_name, 1
    while name in _OWNERS:
        number += 1
        name = f"{class_name}_{number}"
    return name


def _remove_parameters_of_deleted_modules() -> None:
    for name, owner in list(_OWNERS.items()):
        if owner() is None:
            del _OWNERS[name]
    deleted = {id(tensor) for reference in _OF_DELETED_MODULES if (tensor := reference()) is not None}
    _OF_DELETED_MODULES.clear()
    store = pyro.get_param_store()
    for name, tensor in [(name, tensor) for name, tensor in store.named_parameters() if id(tensor) in deleted]:
        # A part of several modules has a name for each; the store forgets its tensor at the first.
        store._param_to_name.setdefault(tensor, name)
        del store[name]
