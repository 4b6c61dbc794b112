"""Request of a bound that a guide resample the draws of each datum."""

from typing import Any, NamedTuple

from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message, effectful


class Resampling(NamedTuple):
    """Draws to resample.

    :param plate: name of the plate over data.
    :param dim: batch dimension of the draws, left of all plates.
    :param threshold: draws of a datum are resampled if their effective sample size is below this share of their number.
    """

    plate: str
    dim: int
    threshold: float


class RequestResampling(Messenger):
    """Request that the guide resample draws between its transitions.

    ``is_read`` tells whether a guide has read the request.

    :param resampling: the draws to resample.

    >>> with RequestResampling(Resampling("data", -2, 0.5)) as request:
    ...     requested_resampling().threshold, request.is_read
    (0.5, True)
    """

    def __init__(self, resampling: Resampling):
        super().__init__()
        self._resampling, self.is_read = resampling, False

    def _pyro_resampling(self, msg: Message) -> None:
        value: Any = self._resampling
        msg["value"], self.is_read = value, True


@effectful(type="resampling")
def requested_resampling() -> Resampling | None:
    """Return what the bound requests of the guide that runs; None if all draws are to be independent."""
    return None
