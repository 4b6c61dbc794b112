"""Abstract Pyro modules: a class with an abstract method cannot be instantiated."""

from abc import ABCMeta

from pyro.nn.module import _PyroModuleMeta


class AbstractModuleMeta(ABCMeta, _PyroModuleMeta):
    """Metaclass of ``PyroModule`` classes in which ``abc.abstractmethod`` takes effect.

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
