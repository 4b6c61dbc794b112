"""Deferred keyboard interrupts, for work that must not be interrupted."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "uninterrupted"]

_HANDLER = signal.default_int_handler


class Interrupts:
    """Context that records the first Ctrl-C and lets the second one raise ``KeyboardInterrupt`` at once.

    Pyro stores plates and contexts in global state.  An exception between any two instructions may leave that state
    inconsistent, so that no model with these plates runs again.  An exception during an import leaves modules without some of
    their names, such as those that PyTorch imports when the first optimiser is made.  So a second Ctrl-C during an import has
    no effect, and a third one raises after it.  Where SIGINT has another handler than Python's own, or in another thread than
    the main one, the context changes nothing.

    >>> steps = 0
    >>> with Interrupts() as interrupts:
    ...     while steps < 3 and not interrupts.received:
    ...         steps += 1
    """

    received: bool
    """Whether Ctrl-C was pressed."""

    def __enter__(self) -> "Interrupts":
        self.received = False
        self._num_imports = _num_imports(sys._getframe())
        self._is_ours = _is_main_thread() and signal.getsignal(signal.SIGINT) is _HANDLER
        if self._is_ours:
            signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, _HANDLER)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received and _num_imports(frame) <= self._num_imports:
            _HANDLER(number, frame)
        self.received = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context, where the handler of SIGINT is called as often as Ctrl-C was pressed.

    The context changes nothing in another thread than the main one, or if SIGINT has no handler in Python.

    >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
    >>> try:
    ...     with uninterrupted():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("done")
    ... except KeyboardInterrupt:
    ...     print("interrupted")
    done
    interrupted
    >>> handler = signal.signal(signal.SIGINT, before)
    """
    handler = signal.getsignal(signal.SIGINT)
    if not (_is_main_thread() and callable(handler)):
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number in pressed:
            handler(number, sys._getframe())


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _num_imports(frame: FrameType | None) -> int:
    """Number of frames of the import system in the stack that ends at a frame."""
    count = 0
    while frame is not None:
        count += frame.f_globals.get("__name__") == "importlib._bootstrap"
        frame = frame.f_back
    return count
