"""Ctrl-C between steps, not within."""

import signal
import threading
from types import FrameType

_HANDLER = signal.default_int_handler


class Interrupts:
    """A context in which the first Ctrl-C is noted, and does nothing until :meth:`check`; a second one acts at once.

    Pyro keeps its plates and contexts in global state.  An exception that comes between any two instructions may leave it
    in disorder, so that no model with these plates runs again.  Where SIGINT has another handler than Python's own, or in
    another thread than the main one, nothing changes.

    >>> steps = 0
    >>> with Interrupts() as interrupts:
    ...     while steps < 3:
    ...         steps += 1
    ...         interrupts.check()
    """

    came: bool
    """Whether it came."""

    def __enter__(self) -> "Interrupts":
        self.came = False
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and signal.getsignal(signal.SIGINT) is _HANDLER
        if self._is_ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, _HANDLER)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            _HANDLER(number, frame)
        self.came = True

    def check(self) -> None:
        """Act on the Ctrl-C that came, if one did.

        :raises KeyboardInterrupt: then.
        """
        if self.came:
            raise KeyboardInterrupt
