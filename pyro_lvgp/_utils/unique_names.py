"""Names of models and guides in Pyro's param store: one for each instance, so that no two share parameters by accident."""

import weakref
from types import TracebackType
from typing import Any

import pyro
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from pyro.poutine.messenger import Messenger

_OWNERS: dict[str, weakref.ReferenceType[PyroModule]] = {}


class UniquelyNamed(PyroModule):
    """Base of models and guides whose parameters have names of their own in Pyro's param store.

    Pyro keys parameters by their names alone, so that two modules of one class would share them.  Here the first instance of a
    class has parameters such as ``BayesianGPLVM.kernel.variance``, and a second one that exists beside it
    ``BayesianGPLVM_2.kernel.variance``.  Names of sample sites, such as ``kernel.variance`` with a prior, have no such prefix.
    Copies and unpickled modules get names of their own too.  A module that is a part of another goes by its name there, as in
    Pyro.  Names and parameters of modules that no longer exist are dropped from the store when the next module is made.

    >>> first, second = UniquelyNamed(), UniquelyNamed()
    >>> first._pyro_name, second._pyro_name
    ('UniquelyNamed', 'UniquelyNamed_2')
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_unique_name()

    def _take_unique_name(self) -> None:
        """Name this module and its parts."""
        name = _free_name(type(self).__name__)
        _OWNERS[name] = weakref.ref(self)
        context = _RootContext(name)
        for path, part in self.named_modules(prefix=name):
            if isinstance(part, PyroModule):
                part._pyro_name, part._pyro_context = path, context

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        context = self._pyro_context
        if isinstance(context, _RootContext) and context.name == self._pyro_name:  # not a part of another module
            self._take_unique_name()


class _RootContext(_Context):
    """Context of a module's call in which sample sites go without the name of the module.

    :param name: of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        # Pyro makes this at construction only; a copy may be made under another setting of module_local_params than it runs.
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


class _WithoutPrefix(Messenger):
    """Remove a prefix from the names of sample sites."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def _pyro_sample(self, msg: Any) -> None:
        msg["name"] = msg["name"].removeprefix(self._prefix)


def _free_name(kind: str) -> str:
    """The kind itself, or with the first number from 2 on that no existing module has."""
    _drop_parameters_of_the_dead()
    name, number = kind, 1
    while name in _OWNERS:
        number += 1
        name = f"{kind}_{number}"
    return name


def _drop_parameters_of_the_dead() -> None:
    for name, owner in list(_OWNERS.items()):
        if owner() is None:
            del _OWNERS[name]
            store = pyro.get_param_store()
            for parameter in [key for key in store if key.startswith(f"{name}.")]:
                del store[parameter]
