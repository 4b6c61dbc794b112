"""Model with its data, for one benchmark of guides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Pyro model and its data.

    :param model: model, called with the data.  If it is written with :mod:`pyroapi`, it is a NumPyro model too.
    :param data: arguments of the model.
    :param vectorize: whether the model broadcasts over dimensions left of its plates.
    :param runs_in_numpyro: whether the model is written with :mod:`pyroapi`, so that NUTS can give a reference.
    """

    model: Callable[..., Any]
    data: tuple[np.ndarray, ...] = ()
    vectorize: bool = True
    runs_in_numpyro: bool = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The data as tensors."""
        return tuple(map(torch.as_tensor, self.data))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Compute the logistic function."""
    return 1.0 / (1.0 + np.exp(-x))
