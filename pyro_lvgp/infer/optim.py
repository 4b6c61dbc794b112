"""Pyro optimisers that update all parameters with one torch optimiser."""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pyro_lvgp._utils.argument_types import checks_types, names_types
from pyro_lvgp.infer._optimizer_state import check_optimizer_state
from pyro_lvgp.infer.row_adam import RowAdam

__all__ = ["JointAdam", "JointOptim", "LazyAdam"]

_NORM_UPDATE_RATE = 0.05
_CLIP_FACTOR = 10.0  # a longer step, caused by a single rare draw, can undo hundreds of others


class JointOptim(PyroOptim):
    """Pyro optimiser that updates all parameters with a single torch optimiser.

    Pyro builds one optimiser per tensor.  A single optimiser is several times faster, and can clip the norm of the whole
    gradient.

    :param optim_constructor: class of a torch optimiser, such as ``torch.optim.Adam``.
    :param optim_args: arguments of the optimiser; ``{"lr": 0.01, "fused": True}`` updates all tensors in one call.
    :param clip_norm: bound on the norm of the whole gradient.
    :param clip_factor: bound on the norm of the whole gradient, as a multiple of the usual norm, an exponential average over
        about twenty steps.  It limits the effect of rare draws with gradients much longer than all others.
    :raises TypeError: if ``optim_args`` is no dict, such as a function of the parameter's name.
    :raises ValueError: for a ``clip_norm`` that is not positive, or a ``clip_factor`` of 1 or less; with ``clip_factor``,
        for a gradient that is not finite, before any parameter changes.

    Source: Seetharaman et al. (2020), "AutoClip: adaptive gradient clipping", for bounds relative to past norms.

    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.infer.autoguide import AutoNormal
    >>> model = lambda: pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
    >>> optim = JointOptim(torch.optim.Adam, {"lr": 0.01}, clip_norm=5.0)
    >>> loss = SVI(model, AutoNormal(model), optim, Trace_ELBO()).step()
    """

    @checks_types
    @names_types
    def __init__(
        self,
        optim_constructor: type[torch.optim.Optimizer] = torch.optim.Adam,
        optim_args: dict[str, Any] | None = None,
        *,
        clip_norm: float | None = None,
        clip_factor: float | None = None,
    ):
        if not isinstance(optim_args, dict | None):
            raise TypeError(
                f"expected optim_args to be a dict for all parameters, got {type(optim_args).__name__}; "
                "pyro.optim.PyroOptim takes a function of the parameter's name"
            )
        if clip_factor is not None and not clip_factor > 1.0:
            raise ValueError(f"expected a clip_factor above 1, got {clip_factor}; it is a multiple of the usual norm")
        if clip_norm is not None and not (clip_norm > 0.0 and not isinstance(clip_norm, bool)):
            raise ValueError(
                f"expected a positive clip_norm, got {clip_norm}, with which steps would go uphill; None does not clip"
            )
        super().__init__(optim_constructor, optim_args or {})
        self._clip_norm, self._clip_factor = clip_norm, clip_factor
        self._constructor, self._args = optim_constructor, dict(optim_args or {})
        self._optimizer: torch.optim.Optimizer | None = None
        self._usual_norm: Tensor | None = None
        self._loaded_states: dict[Tensor | str, dict[str, Any]] = {}  # of parameters that no step has used since loading

    def __call__(self, params: Iterable[Tensor], *args, **kwargs) -> None:
        # SVI passes a set, whose order differs from run to run.
        params = dict.fromkeys(sorted(params, key=_stored_name) if isinstance(params, set) else params)
        if not params:
            return
        optimizer = self._add_params([param for param in params if param not in self.optim_objs])
        if self._loaded_states:
            self._restore(optimizer, params)
        for unused in self.optim_objs.keys() - params.keys():
            unused.grad = None
        all_params = optimizer.param_groups[0]["params"]
        if self._clip_norm is not None:
            _clip(all_params, self._clip_norm, get_total_norm(_gradients(all_params)))
        if self._clip_factor is not None:
            self._clip_relative(all_params, self._clip_factor)
        optimizer.step(*args, **kwargs)

    def _add_params(self, new: list[Tensor]) -> torch.optim.Optimizer:
        """Add new parameters to the only group of the optimiser, so that schedulers always have one group."""
        position = {key: i for i, key in enumerate(self._loaded_states)}
        new.sort(key=lambda param: position.get(param, len(position)))  # in the order of the saved state
        if self._optimizer is None:
            self._optimizer = self._constructor(new, **self._args)
        else:
            self._optimizer.param_groups[0]["params"].extend(new)
        self.optim_objs |= dict.fromkeys(new, self._optimizer)
        return self._optimizer

    def _clip_relative(self, params: Sequence[Tensor], factor: float) -> None:
        """Clip the gradient at a multiple of its usual norm, and update the usual norm."""
        norm = get_total_norm(_gradients(params))
        if not torch.isfinite(norm):  # no extra synchronisation: SVI.step reads the loss at every step
            raise ValueError(
                "expected finite gradients, got NaN or infinity; no parameter was changed: try a smaller learning rate, or "
                "model and data in torch.float64"
            )
        usual = norm if self._usual_norm is None else self._usual_norm.to(norm)
        usual = torch.where(usual > 0.0, usual, norm)
        _clip(params, factor, norm / usual.clamp_min(torch.finfo(usual.dtype).tiny))
        self._usual_norm = usual.lerp(torch.minimum(norm, factor * usual), _NORM_UPDATE_RATE)

    def _restore(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        """Give the optimiser the loaded states of parameters."""
        on_device = any(optimizer.defaults.get(option) for option in ("fused", "capturable"))
        for param in params:
            key = param if param in self._loaded_states else _stored_name(param)
            if key in self._loaded_states:
                steps = param.device if on_device else torch.device("cpu")
                check_optimizer_state(self._loaded_states[key], param, key if isinstance(key, str) else _stored_name(key))
                optimizer.state[param] = _moved(self._loaded_states.pop(key), param.device, steps=steps)

    def get_state(self, names: Mapping[Tensor, str] | None = None) -> dict[str, Any]:
        """Return copies of the usual norm and of the state of every parameter, by its name.

        :param names: names of the parameters; by default those in Pyro's param store.
        :raises ValueError: without ``names``, if parameters are not in the store, as under ``module_local_params``.
        """
        state = {}
        for param, optimizer in self.optim_objs.items():
            if names is None or param in names:  # other parameters are those of another fit
                state[_name(param, names)] = optimizer.state[param]
        for key, saved in self._loaded_states.items():
            state[key if isinstance(key, str) else _name(key, names)] = saved
        return deepcopy({"usual_norm": self._usual_norm, "state": state})

    def set_state(self, state_dict: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Restore a state; the state of each parameter is used from the next step with this parameter on.

        :param state_dict: returned by :meth:`get_state`.
        :param tensors: parameters by their names; by default those in Pyro's param store.
        """
        state_dict = deepcopy(state_dict)  # the optimiser changes the tensors of its state
        self._usual_norm = state_dict["usual_norm"]
        state = state_dict["state"]
        self._loaded_states = state if tensors is None else {tensors[name]: saved for name, saved in state.items()}


class JointAdam(JointOptim):
    """Adam over all parameters at once, with gradients clipped at ten times their usual norm.

    The default optimiser of :func:`~pyro_lvgp.infer.fit`.

    :param lr: learning rate.
    :raises ValueError: for a learning rate that is negative or not finite.

    Source: Kingma and Ba (2015), "Adam: a method for stochastic optimization".

    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from pyro.infer.autoguide import AutoNormal
    >>> model = lambda: pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
    >>> loss = SVI(model, AutoNormal(model), JointAdam(lr=0.02), Trace_ELBO()).step()
    """

    @names_types
    def __init__(self, lr: float = 0.01):
        super().__init__(torch.optim.Adam, {"lr": _checked(lr), "fused": True}, clip_factor=_CLIP_FACTOR)


class LazyAdam(JointOptim):
    """Adam that changes only the rows of the mini-batch, of parameters with one row for each datum.

    :func:`~pyro_lvgp.infer.fit` runs steps under :class:`~pyro_lvgp.infer.SparseRows`, so that the time of a step does not
    grow with the number of rows of the data.  Each row moves as under Adam with its own gradients alone
    (:class:`~pyro_lvgp.infer.RowAdam`).  All other parameters, and the clipping of gradients, are those of :class:`JointAdam`.

    Steps run through Pyro, whatever their number; with ``compile`` other than ``"auto"`` or False ``fit`` raises an error.

    :param lr: learning rate.
    :raises ValueError: for a learning rate that is negative or not finite.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import fit
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(1000, 3)
    >>> model = BayesianGPLVM(1000, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> history = fit(model, MeanFieldGuide(model), Y, optim=LazyAdam(), batch_size=50, num_steps=5, progress=False)
    """

    @names_types
    def __init__(self, lr: float = 0.01):
        super().__init__(RowAdam, {"lr": _checked(lr), "fused": True}, clip_factor=_CLIP_FACTOR)


def _checked(lr: float) -> float:
    """Return a learning rate; raise unless it is one."""
    if isinstance(lr, bool) or not 0.0 <= lr < math.inf:
        raise ValueError(f"expected a finite lr of 0 or more, got {lr}; 0.01 is a common choice")
    return lr


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters, of a sparse gradient the entries of the rows that it has."""
    found = []
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
            found.append(param.grad.values())
        elif param.grad is not None:
            found.append(param.grad)
    return found


def _clip(params: Sequence[Tensor], bound: float, norm: Tensor) -> None:
    """Multiply all gradients by ``bound / norm`` if the norm is above the bound, as torch's ``clip_grads_with_norm_``."""
    is_sparse = [param.grad is not None and param.grad.is_sparse for param in params]
    clip_grads_with_norm_([param for param, sparse in zip(params, is_sparse, strict=True) if not sparse], bound, norm)
    for values in _gradients(param for param, sparse in zip(params, is_sparse, strict=True) if sparse):
        values.mul_((bound / (norm + 1e-6)).clamp(max=1.0))


def _moved(state: dict[str, Any], device: torch.device, *, steps: torch.device) -> dict[str, Any]:
    """Move the state of a parameter to a device, and its number of steps to the device ``steps``."""
    return {
        key: value.to(steps if key == "step" else device) if torch.is_tensor(value) else value for key, value in state.items()
    }


def _stored_name(param: Tensor) -> str:
    """Return the name of a parameter in Pyro's param store; empty for a parameter that is not in the store."""
    return pyro.get_param_store().param_name(param) or ""


def _name(param: Tensor, names: Mapping[Tensor, str] | None) -> str:
    """Return the name of a parameter in ``names``, or by default in Pyro's param store."""
    name = _stored_name(param) if names is None else names[param]
    if not name:
        raise ValueError(
            f"expected parameters with names in Pyro's param store, got one of shape {list(param.shape)} without; under "
            "module_local_params, take pyro_lvgp.infer.Checkpoint, which uses paths in model and guide instead"
        )
    return name
