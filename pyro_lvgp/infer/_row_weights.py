"""Plates over data whose rows have weights, and the handlers of guides that need rows without them."""

from collections.abc import Mapping
from typing import Any

import pyro
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message, effectful
from torch import Tensor

__all__ = ["IgnoreRowWeights", "RefuseRowWeights", "WeightedPlate", "has_row_weights"]


class WeightedFrame(CondIndepStackFrame):
    """Frame of a :class:`WeightedPlate` in the stack of plates of a site."""


def has_row_weights(site: Mapping[str, Any]) -> bool:
    """Return whether the scale of a site has the weights of rows.

    :param site: site of a trace.
    """
    return any(isinstance(frame, WeightedFrame) for frame in site["cond_indep_stack"])


class WeightedPlate(pyro.plate):
    """Plate whose sites have a weight for each row beside the scale of a mini-batch.

    A bound that is a sum over rows then is a weighted sum.  Model and guide both need this plate.

    :param weight: weights of the rows of the subsample, 0 or more.
    :param args: arguments of ``pyro.plate``.
    :param kwargs: keyword arguments of ``pyro.plate``; ``dim`` must be −1.

    >>> import torch
    >>> from pyro import poutine
    >>> import pyro.distributions as dist
    >>> def model():
    ...     with WeightedPlate(torch.tensor([2.0, 0.0]), "data", 2, dim=-1):
    ...         pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> poutine.trace(model).get_trace().nodes["x"]["scale"]
    tensor([2., 0.])
    """

    def __init__(self, weight: Tensor, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.weight = weight
        self._applied: Tensor | None = weight

    def __enter__(self) -> Any:
        self._applied = _row_weight(self.weight)
        return super().__enter__()

    def _process_message(self, msg: Message) -> None:
        super()._process_message(msg)
        if self._applied is not None:
            msg["scale"] = msg["scale"] * self._applied
            frame, *others = msg["cond_indep_stack"]
            msg["cond_indep_stack"] = (WeightedFrame(*frame), *others)


@effectful(type="row_weight")
def _row_weight(weight: Tensor) -> Tensor | None:
    """Send a message to handlers, which set its value to None to leave out the weights of rows."""
    return weight


class IgnoreRowWeights(Messenger):
    """Leave out the weights of rows, as for the chain of a row, whose target is the posterior of that row alone.

    >>> import torch
    >>> import pyro.distributions as dist
    >>> plate = WeightedPlate(torch.tensor([2.0, 0.0]), "data", 2, dim=-1)
    >>> with pyro.poutine.trace() as traced, IgnoreRowWeights(), plate:
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> traced.trace.nodes["x"]["scale"]
    1.0
    """

    def _pyro_row_weight(self, msg: Message) -> None:
        # The function of the message runs after handlers, unless the message is done.
        msg["value"], msg["done"] = None, True


class RefuseRowWeights(Messenger):
    """Raise a ``ValueError`` for weights of rows, as where one chain has the latents of all rows."""

    def _pyro_row_weight(self, msg: Message) -> None:
        raise ValueError(
            "expected rows without weights for a chain of all latents jointly, got weights, which need a chain for each row; "
            'pass local_plate="data" to the annealed guide, or leave out weight'
        )
