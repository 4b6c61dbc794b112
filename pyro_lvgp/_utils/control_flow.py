"""Control flow that depends on the values of tensors, as conditions that a recorded graph checks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["holds", "is_recording", "record_conditions"]

_RECORDER: ContextVar[Callable[[Tensor], bool] | None] = ContextVar("recorder", default=None)


def holds(condition: Tensor) -> bool:
    """Evaluate a condition on tensors that selects a specialised branch.

    A graph recorded in the specialised branch evaluates the condition at every run and reports whether it is true.  A graph
    recorded in the general branch does not evaluate the condition, so that the general branch must be correct in both cases.

    :param condition: tensor of one boolean.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0])
    >>> "complete" if holds(~torch.isnan(x).any()) else "has gaps"
    'complete'
    """
    recorder = _RECORDER.get()
    return bool(condition) if recorder is None else recorder(condition)


def is_recording() -> bool:
    """Whether operations are being recorded, so that shapes must not depend on the values of tensors."""
    return _RECORDER.get() is not None


@contextmanager
def record_conditions(recorder: Callable[[Tensor], bool]) -> Iterator[None]:
    """Pass each condition of :func:`holds` to a recorder.

    :param recorder: evaluates a condition, and records the condition.

    >>> import torch
    >>> with record_conditions(lambda condition: False):
    ...     is_recording(), holds(torch.tensor(True))
    (True, False)
    """
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)
