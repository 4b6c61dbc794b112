"""Ascent by L-BFGS of functions that may be undefined at some points."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LARGE = 1e30


class Ascent:
    """Ascent of a function from a point.

    :param objective: function of a point, with its value, −∞ where undefined, and its gradient, NaN where undefined.
    :param start: first point, in whose precision the line searches run.
    """

    def __init__(self, objective: Callable[[Tensor], tuple[float, Tensor]], start: Tensor):
        self._objective, self._point = objective, start.clone().requires_grad_()
        self._optimizer: Any = torch.optim.LBFGS([self._point], history_size=10, line_search_fn="strong_wolfe")

    def run(self, *, max_iter: int, max_eval: int) -> Tensor:
        """Take iterations with at most so many evaluations; return the point reached."""
        self._optimizer.param_groups[0].update(max_iter=max_iter, max_eval=max_eval)
        with torch.enable_grad():
            self._optimizer.step(self._minus_objective)
        return self._point.detach().clone()

    def _minus_objective(self) -> Tensor:
        value, gradient = self._objective(self._point.detach())
        self._point.grad = -gradient.nan_to_num(0.0).to(self._point)
        # The line search interpolates between values, so that they must be finite.
        return self._point.new_tensor(-max(value, -_LARGE))
