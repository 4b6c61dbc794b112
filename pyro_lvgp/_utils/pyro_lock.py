"""Lock of the global state of Pyro and of PyTorch's random numbers."""

import os
import threading
from contextlib import ContextDecorator
from types import TracebackType

__all__ = ["pyro_lock"]


class PyroLock(ContextDecorator):
    """Re-entrant lock of the global state that Pyro's models and guides share in a process.

    Pyro keeps its stack of handlers, its parameter store and its settings in global variables, and seeds are those of
    PyTorch's global random state, so that two threads cannot run models at the same time.  The functions and methods of this
    package that run models or guides take the lock, and threads wait for each other: results are those of calls in sequence.
    Code that calls a model, a guide or ``SVI`` by itself takes the lock itself, as a context or as a decorator.

    A thread that has the lock must not wait for another thread that needs it, such as a callback of ``fit`` that waits for
    a prediction in a thread.  A process that is forked starts with a free lock.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> @pyro_lock
    ... def draw(seed):
    ...     pyro.set_rng_seed(seed)
    ...     return pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> with ThreadPoolExecutor(2) as pool:
    ...     draws = list(pool.map(draw, [0, 0]))
    >>> bool(draws[0] == draws[1])
    True
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # the thread that has the lock does not exist in the child
            os.register_at_fork(after_in_child=self._release_in_child)

    def __enter__(self) -> "PyroLock":
        self._lock.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def _release_in_child(self) -> None:
        self._lock = threading.RLock()


pyro_lock = PyroLock()
