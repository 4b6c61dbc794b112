"""Learning-rate schedules for the optimisers of a fit."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks.base import Callback
from pyro_lvgp.infer.callbacks.convergence import StopOnConvergence

__all__ = ["LRSchedule"]


class LRSchedule(Callback):
    r"""Learning-rate schedule of all optimisers of a fit, including those of blocks, by schedulers of torch.

    The schedule ``"cosine"`` lowers the learning rate from :math:`\eta_0` to zero at the end of the fit,

    .. math:: \eta_t = \tfrac{1}{2} \eta_0 \Big(1 + \cos\frac{\pi t}{T}\Big), \qquad t = 0, \dots, T - 1,

    at step t of T, or sweep through the blocks.  Schedulers take a step after each step of the fit.

    :param schedule: ``"cosine"``, or a function of an optimiser that returns a scheduler.
    :raises ValueError: for any other string; at the start, for ``"cosine"`` with
        :class:`~pyro_lvgp.infer.StopOnConvergence`, because the number of steps is unknown, and any bound becomes flat as the
        learning rate goes to zero.
    :raises TypeError: at the first step, if the function returns no scheduler.

    >>> import pyro, torch
    >>> from pyro_lvgp.infer import fit
    >>> def model():
    ...     pyro.factor("loss", -pyro.param("p", torch.tensor(1.0)))
    >>> halved = LRSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    >>> optim = pyro.optim.SGD({"lr": 1.0})
    >>> history = fit(model, lambda: None, optim=optim, num_steps=3, callbacks=[halved], progress=False)
    >>> history.losses
    [1.0, 0.0, -0.5]

    Source: Loshchilov and Hutter (2017), "SGDR: stochastic gradient descent with warm restarts", eq. 5.
    """

    @checks_types
    def __init__(self, schedule: Literal["cosine"] | Callable[[Optimizer], LRScheduler] = "cosine"):
        if schedule != "cosine" and not callable(schedule):
            raise ValueError(
                f'expected schedule "cosine" or a function of an optimiser, got {schedule!r}; use lambda optimizer: '
                "torch.optim.lr_scheduler.StepLR(optimizer, 100), for example"
            )
        self.schedule = schedule

    def on_start(self, state: FitState) -> None:
        """Register a hook that makes the scheduler of each optimiser at its first step.

        :param state: the fit.
        :raises ValueError: for ``"cosine"`` in a fit that ends by :class:`~pyro_lvgp.infer.StopOnConvergence`.
        """
        if self.schedule == "cosine" and any(isinstance(callback, StopOnConvergence) for callback in state.callbacks):
            raise ValueError(
                'expected a fixed number of steps for the schedule "cosine", which falls to zero at the last step, got a fit '
                'that ends when the bound has converged; fit with num_steps="auto" first, and then with the schedule'
            )
        self._state = state
        self._schedulers: dict[Optimizer, tuple[str, LRScheduler]] = {}
        self._initial_rates: dict[Optimizer, list[Any]] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer_step)

    def on_step(self, state: FitState) -> None:
        """Step the schedulers.

        :param state: the fit.
        """
        for _, scheduler in self._schedulers.values():
            _advance(scheduler, state.history.losses[-1])

    def on_end(self, state: FitState) -> None:
        """Restore the initial learning rates of the optimisers, for later fits.

        :param state: the fit.
        """
        self._hook.remove()
        for optimizer, rates in self._initial_rates.items():
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
                group.pop("initial_lr", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedulers, and the settings of their optimisers."""
        made = {
            name: {
                "scheduler": scheduler.state_dict(),
                "settings": [_settings(group) for group in optimizer.param_groups],
            }
            for optimizer, (name, scheduler) in self._schedulers.items()
        }
        return self._saved | made

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore states; schedulers load them at the first step of their optimisers.

        :param state: returned by :meth:`state_dict`.
        """
        self._saved = dict(state)

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Make the scheduler of an optimiser of the fit at its first step."""
        if optimizer in self._schedulers:
            return
        name = next((name for name, own in self._state.optimizers().items() if own is optimizer), None)
        if name is None:
            return
        self._initial_rates[optimizer] = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        scheduler = self._make_scheduler(optimizer)
        if (saved := self._saved.pop(name, None)) is not None:
            scheduler.load_state_dict(saved["scheduler"])
            for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
                group |= settings
        elif not isinstance(scheduler, ReduceLROnPlateau):
            for _ in range(self._state.step):  # for an optimiser that is made after the first step
                _advance(scheduler, math.nan)
        self._schedulers[optimizer] = name, scheduler

    def _make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        if not callable(self.schedule):
            num_steps = self._state.num_steps
            return LambdaLR(optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / num_steps, 1.0))))
        scheduler = self.schedule(optimizer)
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"expected schedule to make a scheduler of an optimiser, got {type(scheduler).__name__}; for a function of "
                "the step, use lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, function)"
            )
        return scheduler


def _advance(scheduler: LRScheduler, loss: float) -> None:
    with warnings.catch_warnings():
        # The scheduler was made in a hook before the optimiser's first step, which it did not count.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
