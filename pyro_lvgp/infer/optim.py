"""One torch optimiser for all parameters, as SVI wants it."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from pyro_lvgp._utils.distributed import Processes

_FORGETTING = 0.05


class JointOptim(PyroOptim):
    """A ``PyroOptim`` that steps all parameters with a single torch optimiser.

    Pyro builds one optimiser per tensor.  A single one costs a fraction of the time, and sees the whole gradient, so that
    its norm can be clipped.

    :param optim_constructor: a torch optimiser, such as ``torch.optim.Adam``.
    :param optim_args: its arguments; ``{"lr": 0.01, "fused": True}`` updates all tensors in one call.
    :param clip_norm: bound on the norm of the whole gradient.
    :param clip_factor: the same in units of its usual norm, an average over the last twenty steps or so: a rare draw whose
        gradient is a thousand times longer than all others then moves nothing far.
    :param schedule: maps the number of steps taken to a factor on the learning rate.
    :param distributed: step along the mean of the gradients of all processes that ``torch.distributed`` joins; each must take
        as many steps.  If they meet new parameters with other values, they take over those of the first, and move none then.
    :raises TypeError: if ``optim_args`` is no dict, such as a function of the parameter's name.
    :raises ValueError: for a ``clip_factor`` of 1 or less; with one, where a gradient is not finite, before it moves anything;
        with several processes, where these have other parameters, or some that are not in Pyro's param store.
    :raises RuntimeError: if no processes are joined though ``distributed`` asks for them.

    Source: Seetharaman et al. (2020), "AutoClip: adaptive gradient clipping", for bounds relative to past norms.

    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.infer.autoguide import AutoNormal
    >>> model = lambda: pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
    >>> optim = JointOptim(torch.optim.Adam, {"lr": 0.01}, schedule=lambda step: 0.99**step)
    >>> loss = SVI(model, AutoNormal(model), optim, Trace_ELBO()).step()
    """

    def __init__(
        self,
        optim_constructor: type[torch.optim.Optimizer] = torch.optim.Adam,
        optim_args: dict[str, Any] | None = None,
        *,
        clip_norm: float | None = None,
        clip_factor: float | None = None,
        schedule: Callable[[int], float] | None = None,
        distributed: bool = False,
    ):
        if not isinstance(optim_args, dict | None):
            raise TypeError(
                f"expected optim_args to be a dict for all parameters, got {type(optim_args).__name__}; "
                "pyro.optim.PyroOptim takes a function of the parameter's name"
            )
        if clip_factor is not None and not clip_factor > 1.0:
            raise ValueError(f"expected a clip_factor above 1, got {clip_factor}; it is a multiple of the usual norm")
        super().__init__(optim_constructor, optim_args or {})
        self._clip_norm, self._clip_factor, self._schedule = clip_norm, clip_factor, schedule
        self._usual_norm: Tensor | None = None
        self._constructor, self._args = optim_constructor, dict(optim_args or {})
        self._known: set[Tensor] = set()
        self._unrestored: set[Tensor] = set()
        self._nameless_waiting: list[tuple[Tensor, dict]] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._base_lrs: list[float] = []
        self._num_steps = 0
        self.distributed, self._processes = distributed, Processes(distributed)

    def __call__(self, params: Iterable[Tensor], *args, **kwargs) -> None:
        params = set(params)
        if not params:  # of a guide that is exact, say
            return
        if (new := params - self._known) and not self._add(new):
            return  # gradients were those of other values
        if unrestored := params & self._unrestored:
            self._restore(unrestored)
        for idle in self._known - params:
            idle.grad = None
        assert self._optimizer is not None
        ordered = [param for group in self._optimizer.param_groups for param in group["params"]]
        self._processes.average_gradients(ordered)
        if self._clip_norm is not None:
            clip_grad_norm_(ordered, self._clip_norm)
        if self._clip_factor is not None:
            self._clip_unusual(ordered, self._clip_factor)
        if self._schedule is not None:
            factor = self._schedule(self._num_steps)
            for group, lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = lr * factor
        self._optimizer.step(*args, **kwargs)
        self._num_steps += 1

    def _clip_unusual(self, params: Sequence[Tensor], factor: float) -> None:
        norm = get_total_norm([param.grad for param in params if param.grad is not None])
        if not torch.isfinite(norm):  # SVI waits for the device at every step as it is
            raise ValueError(
                "expected finite gradients, got NaN or infinity; nothing was moved by them: try a smaller learning rate, or "
                "dtype=torch.float64"
            )
        usual = norm if self._usual_norm is None else self._usual_norm.to(norm)
        usual = torch.where(usual > 0.0, usual, norm)
        clip_grads_with_norm_(params, factor, norm / usual.clamp_min(torch.finfo(usual.dtype).tiny))
        self._usual_norm = usual.lerp(torch.minimum(norm, factor * usual), _FORGETTING)

    def _add(self, new: set[Tensor]) -> bool:
        """Take up new parameters; whether these had the values of the first process already."""
        # A set of tensors has no stable order; names do.
        ordered = sorted(new, key=_name)
        named = {_name(param): param for param in ordered}
        if self._processes.size > 1 and "" in named:
            raise ValueError(
                "expected parameters with names, by which processes know each other's, got some that are not in Pyro's param "
                "store; do without module_local_params"
            )
        if self._optimizer is None:
            self._optimizer = self._constructor(ordered, **self._args)
        else:
            self._optimizer.add_param_group({"params": ordered})
        self._base_lrs = [*self._base_lrs, self._optimizer.param_groups[-1]["lr"]]
        self._known |= new
        self._unrestored |= new
        return self._processes.make_alike(named)

    def _restore(self, params: set[Tensor]) -> None:
        assert self._optimizer is not None
        one_launch = any(self._optimizer.defaults.get(option) for option in ("fused", "capturable"))
        for param in params:
            name = _name(param)
            state = self._state_waiting_to_be_consumed.pop(name, None) if name else self._nameless_state(param)
            if state is not None:
                steps = param.device if one_launch else torch.device("cpu")
                self._optimizer.state[param] = _moved(state, param.device, steps=steps)
        self._unrestored -= params

    def _nameless_state(self, param: Tensor) -> dict | None:
        """The waiting state of the parameter that had this value: SVI hands parameters over in no order."""
        waiting = self._nameless_waiting
        alike = [i for i, (value, _) in enumerate(waiting) if torch.equal(value.to(param), param)]
        if any(not _equal(waiting[i][1], waiting[alike[0]][1]) for i in alike):
            raise ValueError(
                f"expected parameters that differ, to know them again without names, got {len(alike)} with one value, of "
                f"shape {list(param.shape)}; save the state some steps later, or do without module_local_params"
            )
        if alike:
            return waiting.pop(alike[0])[1]
        if waiting:
            raise ValueError(
                "expected parameters as they were when the state of the optimiser was saved, of shapes "
                f"{[list(value.shape) for value, _ in waiting]}, got one of shape {list(param.shape)} "
                "or with another value; before the next step, load the parameters of model and guide that were saved with it"
            )
        return None

    def get_state(self) -> dict:
        """A copy of the number of steps taken, the usual norm, and the state of every parameter.

        The last goes by the name in the param store, or, where there is none as under ``module_local_params``, by the value.
        """
        state, nameless = {}, []
        if self._optimizer is not None:
            for param in self._known:
                moments = self._optimizer.state[param]
                if name := _name(param):
                    state[name] = moments
                elif param not in self._unrestored or not self._nameless_waiting:
                    nameless.append((param.detach(), moments))
        state |= self._state_waiting_to_be_consumed
        found = {
            "num_steps": self._num_steps,
            "usual_norm": self._usual_norm,
            "state": state,
            "nameless": [*nameless, *self._nameless_waiting],
        }
        return deepcopy(found)

    def set_state(self, state_dict: dict) -> None:
        """Restore what ``get_state`` returned; parameters take their state when they are next seen.

        Those without names must by then have the values they had, which must tell them apart; else that step raises a
        ``ValueError``.

        :param state_dict: what :meth:`get_state` returned.
        """
        state_dict = deepcopy(state_dict)  # of which the optimiser would move the tensors
        self._num_steps, self._usual_norm = state_dict["num_steps"], state_dict.get("usual_norm")
        self._state_waiting_to_be_consumed.update(state_dict["state"])
        self._nameless_waiting = list(state_dict.get("nameless", ()))
        self._unrestored = set(self._known)


def _equal(state: dict, other: dict) -> bool:
    return state.keys() == other.keys() and all(
        value is other[key] or torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])) for key, value in state.items()
    )


def _moved(state: dict, device: torch.device, *, steps: torch.device) -> dict:
    """A parameter's state on one device, and the number of steps on that where the optimiser keeps it."""
    return {
        key: value.to(steps if key == "step" else device) if torch.is_tensor(value) else value for key, value in state.items()
    }


def _name(param: Tensor) -> str:
    return pyro.get_param_store().param_name(param) or ""
