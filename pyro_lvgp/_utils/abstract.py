"""Abstract Pyro modules: a class with an abstract method cannot be instantiated."""

from abc import ABCMeta

from pyro.nn.module import _PyroModuleMeta

from pyro_lvgp._utils.construction import RecordsConstruction


class AbstractModuleMeta(RecordsConstruction, ABCMeta, _PyroModuleMeta):
    """Metaclass of modules in which ``abc.abstractmethod`` takes effect, and whose constructors are recorded.

    Python checks abstract methods only in classes whose metaclass is an ``ABCMeta``, and that of ``PyroModule`` is not.

    >>> from abc import abstractmethod
    >>> from pyro.nn import PyroModule
    >>> class Base(PyroModule, metaclass=AbstractModuleMeta):
    ...     @abstractmethod
    ...     def scale(self): ...
    >>> try:
    ...     Base()
    ... except TypeError as error:
    ...     print("abstract" in str(error))
    True
    """
