"""Ascent by L-BFGS of functions that may be undefined at some points."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LEAST_RISE = 1e-4  # nats that are worth more steps
_LARGE = 1e30
_NUM_ITERATIONS = 4


class Ascent:
    """Ascent of a log density, or of a bound, from a point.

    :param objective: function of a point, with its value, −∞ where undefined, and its gradient, NaN where undefined.
    :param start: first point, in whose precision the line searches run.
    """

    def __init__(self, objective: Callable[[Tensor], tuple[float, Tensor]], start: Tensor):
        self._objective, self._point = objective, start.clone().requires_grad_()
        self._optimizer: Any = torch.optim.LBFGS([self._point], history_size=10, line_search_fn="strong_wolfe")
        self._evaluated: tuple[Tensor, float, Tensor] | None = None
        self._num_evaluations = 0
        self.has_converged = False

    def run(self, *, max_iter: int, max_eval: int) -> Tensor:
        """Take iterations, with about as many evaluations at most, until the value hardly rises; return the point reached.

        :param max_iter: number of iterations.
        :param max_eval: number of evaluations.
        """
        last = self._num_evaluations + max_eval
        while max_iter > 0 and self._num_evaluations < last and not self.has_converged:
            num = min(max_iter, _NUM_ITERATIONS)
            self._optimizer.param_groups[0].update(max_iter=num, max_eval=last - self._num_evaluations)
            before = self._evaluate()[0]
            with torch.enable_grad():
                self._optimizer.step(self._minus_objective)
            self.has_converged = num == _NUM_ITERATIONS and not self._evaluate()[0] - before > LEAST_RISE
            max_iter -= num
        return self._point.detach().clone()

    def _evaluate(self) -> tuple[float, Tensor]:
        """Return value and gradient at the point, which are computed once for a point that is evaluated repeatedly."""
        point = self._point.detach()
        if self._evaluated is None or not torch.equal(point, self._evaluated[0]):
            value, gradient = self._objective(point)
            # The line search interpolates between values, so that they must be finite.
            self._evaluated = (point.clone(), max(value, -_LARGE), gradient.nan_to_num(0.0).to(point))
            self._num_evaluations += 1
        return self._evaluated[1:]

    def _minus_objective(self) -> Tensor:
        value, gradient = self._evaluate()
        self._point.grad = -gradient
        return self._point.new_tensor(-value)
