"""Deferred keyboard interrupts, for loops whose steps must not be interrupted."""

import signal
import threading
from types import FrameType

__all__ = ["Interrupts"]

_HANDLER = signal.default_int_handler


class Interrupts:
    """Context that records the first Ctrl-C and lets the second one raise ``KeyboardInterrupt`` at once.

    Pyro stores plates and contexts in global state.  An exception between any two instructions may leave that state
    inconsistent, so that no model with these plates runs again.  Where SIGINT has another handler than Python's own, or
    in another thread than the main one, the context changes nothing.

    >>> steps = 0
    >>> with Interrupts() as interrupts:
    ...     while steps < 3 and not interrupts.received:
    ...         steps += 1
    """

    received: bool
    """Whether Ctrl-C was pressed."""

    def __enter__(self) -> "Interrupts":
        self.received = False
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and signal.getsignal(signal.SIGINT) is _HANDLER
        if self._is_ours:
            signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, _HANDLER)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            _HANDLER(number, frame)
        self.received = True
