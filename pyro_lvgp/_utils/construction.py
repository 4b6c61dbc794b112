"""Arguments that objects were constructed with."""

from copy import deepcopy
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from pyro_lvgp._utils.argument_types import types_checked

__all__ = ["Construction", "RecordsConstruction", "construction_of", "copy_with_construction"]

Instance = TypeVar("Instance")


class Construction(NamedTuple):
    """Call of a constructor."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_CONSTRUCTIONS: WeakKeyDictionary[Any, Construction] = WeakKeyDictionary()


class RecordsConstruction(type):
    """Metaclass of classes whose instances can be constructed again, and whose errors name arguments of other types.

    >>> class Scale(metaclass=RecordsConstruction):
    ...     def __init__(self, value, *, name="scale"):
    ...         self.value = value
    >>> scale = Scale(2.0, name="s")
    >>> construction_of(scale).args, construction_of(scale).kwargs
    ((2.0,), {'name': 's'})
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        constructor: Any = cls.__init__  # type: ignore[misc]
        with types_checked(constructor, (cls, *args), kwargs):
            created = super().__call__(*args, **kwargs)
        _CONSTRUCTIONS[created] = Construction(cls, args, kwargs)
        return created


def construction_of(instance: Any) -> Construction | None:
    """Return the call that constructed an object; None for copies, unpickled objects and objects of other classes.

    :param instance: the object.
    """
    return _CONSTRUCTIONS.get(instance)


def copy_with_construction(instance: Instance) -> Instance:
    """Copy an object that refers to nothing but its own parts, and whose copy can be constructed as the object was.

    :param instance: the object.

    >>> class Scale(metaclass=RecordsConstruction):
    ...     def __init__(self, value):
    ...         self.value = value
    >>> construction_of(copy_with_construction(Scale(2.0))).args
    (2.0,)
    """
    copy = deepcopy(instance)
    if (construction := construction_of(instance)) is not None:
        _CONSTRUCTIONS[copy] = construction
    return copy
