"""Progress bars of functions that may take more than two seconds."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

__all__ = ["progress_bar"]

_Item = TypeVar("_Item")
_DELAY = 2.0  # seconds


def progress_bar(items: Iterable[_Item], name: str, total: int | None = None) -> Iterable[_Item]:
    """Iterate over items with a bar that appears after two seconds, on terminals and in notebooks, and vanishes at the end.

    The environment variable ``TQDM_DISABLE=1`` hides it.

    :param items: the items.
    :param name: what is done with them.
    :param total: their number, if they have no length.

    >>> sum(progress_bar(range(4), "sum"))
    6
    """
    return tqdm(items, desc=name, total=total, delay=_DELAY, disable=None, leave=False)
