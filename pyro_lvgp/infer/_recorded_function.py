"""Functions of tensors whose operations are recorded after some calls, to run without Python."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pyro_lvgp._compile.compilation import Compiled, compile_graph
from pyro_lvgp._compile.recording import is_traced, record

__all__ = ["RecordedFunction"]

_LOG = logging.getLogger("pyro_lvgp")
_NUM_EAGER = 50  # a recording takes as long as some 50 calls


class RecordedFunction:
    """Deterministic function of tensors on a CPU, whose operations run without Python after 50 calls with equal shapes.

    The results are those of the function to the last bit.  A graph holds for the values that every Python boolean made of a
    tensor had when it was recorded, those of Pyro's validation among them.  Where one differs, or a factorization fails, the
    function itself is called.  So it is where its operations cannot be recorded, or draw random numbers; the log tells why.

    :param function: maps tensors to tensors, without gradients; everything that it reads but its arguments stays as it is.

    >>> double = RecordedFunction(lambda x: (2.0 * x if x > 0.0 else x,))
    >>> [double(x)[0].item() for x in torch.linspace(0.0, 1.0, 60).flip(0)[-3:]]
    [0.06779661029577255, 0.033898305147886276, 0.0]
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]]):
        self._function = function
        self._num_calls: Counter[Any] = Counter()
        self._graphs: dict[Any, Compiled | None] = {}

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        """Call the function.

        :param tensors: its arguments.
        """
        if is_traced() or any(x.device.type != "cpu" for x in tensors):
            return self._function(*tensors)
        key = tuple((x.shape, x.stride(), x.dtype) for x in tensors)
        if (graph := self._graphs.get(key)) is not None:
            with _disable_current_modes():  # which would be called for each operation
                *found, is_valid = graph(*tensors)
            if is_valid:
                return found
        results = self._function(*tensors)
        self._num_calls[key] += 1
        if self._num_calls[key] == _NUM_EAGER:
            self._graphs[key] = self._recorded(tensors)
        return results

    def _recorded(self, tensors: Sequence[Tensor]) -> Compiled | None:
        """Return the operations of the function; None if they cannot be recorded."""
        try:
            recording = record(lambda: self._function(*tensors), tensors, guarded=True)
            if recording.draws:
                raise ValueError("expected a function without random numbers, got one that draws some")
            with _disable_current_modes():
                return compile_graph(recording.graph, tensors, backend="torchscript")
        except Exception as error:  # whatever a model raises where it is recorded
            _LOG.info("a log density is evaluated without a graph: %s", error)
            return None
