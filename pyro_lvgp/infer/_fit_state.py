"""State of a fit."""

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_lvgp._utils.distributed import ProcessGroup
from pyro_lvgp._utils.tables import Table
from pyro_lvgp._utils.validation import check_sizes, check_tensors
from pyro_lvgp.infer._compile_setting import Compile, make_bound, uses_graph
from pyro_lvgp.infer._fit_result import FitResult
from pyro_lvgp.infer._mini_batches import MiniBatches
from pyro_lvgp.infer._parameters import name_parameters
from pyro_lvgp.infer._svi import CheckedSVI
from pyro_lvgp.infer.block import Block
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.optim import JointAdam
from pyro_lvgp.infer.protocols import ChecksData, TakesMiniBatches, TakesTables

__all__ = ["FitState", "Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """Object with a state that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        ...


class FitState:
    """State of a fit, which :func:`~pyro_lvgp.infer.fit` passes to each :class:`~pyro_lvgp.infer.Callback`.

    The arguments are those of :func:`~pyro_lvgp.infer.fit`.  The attributes are

    - ``model``, ``guide``, ``args``, the data, and ``num_steps``, the number of steps at which the fit ends;
    - ``svi``, the object whose ``step`` the fit calls: Pyro's ``SVI``, or a :class:`~pyro_lvgp.infer.BlockCoordinateVI`;
    - ``batches``, the iterator over the arguments of the steps;
    - ``history``, a :class:`~pyro_lvgp.infer.FitResult`;
    - ``callbacks``, in the order in which they are called;
    - ``seed``, the seed of the fit;
    - ``processes``, the group of processes that share the fit, by default this one alone;
    - ``is_compiled``, whether the bound runs as a graph.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param args: data.
    :param loss: bound to maximise.
    :param optim: a Pyro optimiser, or blocks.
    :param num_steps: number of steps.
    :param batch_size: rows in a mini-batch.
    :param callbacks: the callbacks of the fit.
    :param compile: as for :func:`~pyro_lvgp.infer.fit`.
    :param seed: seed of the fit.

    >>> import pyro
    >>> def model():
    ...     pyro.factor("loss", -pyro.param("p", torch.tensor(1.0)).square())
    >>> state = FitState(model, lambda: None, num_steps=2)
    >>> state.take_step()
    >>> state.step, state.is_finished, list(state.parameters())
    (1, False, ['p'])
    >>> state.stop()
    >>> state.is_finished
    True
    """

    svi: CheckedSVI | BlockCoordinateVI

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Table,
        loss: ELBO | None = None,
        optim: PyroOptim | Sequence[Block] | None = None,
        num_steps: int = 1000,
        batch_size: int | None = None,
        callbacks: Sequence[Stateful] = (),
        compile: Compile = False,
        seed: int | None = 0,
    ):
        check_sizes(least=0, num_steps=num_steps)
        if isinstance(model, TakesTables) and not isinstance(model, type):
            _check_num_tensors(model.as_data, args)
            args = model.as_data(*args)
        check_tensors(args)
        args = tuple(arg.clone() if arg.is_inference() else arg for arg in args)  # autograd takes no inference tensors
        _check_model_and_guide(model, guide, args)
        tables = [arg for arg in args if arg.dim()] or [torch.empty(0)]
        data = next((arg for arg in reversed(tables) if arg.is_floating_point()), tables[-1])
        self.model, self.guide, self.args, self.num_steps, self.seed = model, guide, args, num_steps, seed
        self.batches = MiniBatches(
            args, len(data), batch_size, model.mini_batch if isinstance(model, TakesMiniBatches) else None
        )
        parts = (model, guide, loss, optim, *callbacks)
        self.is_compiled = uses_graph(compile, num_steps, parts, args)
        self.svi = _make_svi(model, guide, loss, optim, compile=compile if self.is_compiled else False)
        self.history = FitResult(
            num_entries=int((~torch.isnan(data)).sum()) if len(data) else 1, steps_per_epoch=self.batches.steps_per_epoch
        )
        self.callbacks, self.processes = tuple(callbacks), ProcessGroup()
        self._is_stopped = False
        self._start_time: float | None = None

    @property
    def step(self) -> int:
        """Number of steps taken, including those before a checkpoint."""
        return len(self.history.losses)

    @property
    def is_finished(self) -> bool:
        """Whether no step follows."""
        return self._is_stopped or self.step >= self.num_steps

    def stop(self) -> None:
        """End the fit after the present step."""
        self._is_stopped = True

    def take_step(self) -> None:
        """Take a step, and add its loss to the history."""
        seconds, now = self.history.seconds, time.perf_counter()
        if self._start_time is None:
            self._start_time = now - (seconds[-1] if seconds else 0.0)
        loss = self.processes.mean(float(self.svi.step(*next(self.batches))))
        self.history.losses.append(loss)
        seconds.append(time.perf_counter() - self._start_time)

    def initialize_parameters(self) -> None:
        """Evaluate the bound once, because guides and functions make their parameters at the first call."""
        self.svi.evaluate_loss(*self.batches.example())

    def parameters(self) -> dict[str, Tensor]:
        """Return unconstrained parameters by their path in model and guide, such as ``"model.kernel.variance"``.

        Parameters of functions have their names in Pyro's param store, and are included after the first step that uses them.
        """
        return name_parameters(self.model, self.guide, self.svi.parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by their path in model and guide."""
        found = self.parameters()
        for prefix, part in (("model", self.model), ("guide", self.guide)):
            if isinstance(part, nn.Module):
                found |= {f"{prefix}.{name}": buffer for name, buffer in part.named_buffers()}
        return found

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the torch optimisers in use, by the path of their first parameter or the name of their block.

        An optimiser is made at the first step that needs it.
        """
        if isinstance(self.svi, BlockCoordinateVI):
            return dict(self.svi.optimizers)
        names: dict[torch.optim.Optimizer, str] = {}
        made = self.svi.optim.optim_objs
        for name, param in self.parameters().items():
            if param in made:
                found = made[param]  # pyro.optim.PyroLRScheduler has torch's schedulers there
                names.setdefault(found if isinstance(found, torch.optim.Optimizer) else found.optimizer, name)
        return {name: optimizer for optimizer, name in names.items()}

    def clear_gradients(self) -> None:
        """Remove the gradients of all parameters, which an interrupted step leaves."""
        for param in self.parameters().values():
            param.grad = None


def _check_model_and_guide(model: Callable[..., Any], guide: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    for part in (model, guide):
        if isinstance(part, type):
            raise TypeError(f"expected a model and its guide, got the class {part.__name__}; make one: {part.__name__}(...)")
    if isinstance(model, AutoGuide) and not isinstance(guide, AutoGuide):
        raise TypeError(
            f"expected a model and then its guide, got {type(model).__name__}, which is a guide, as the model; swap the two"
        )
    if isinstance(model, ChecksData):
        _check_num_tensors(model.check, args)
        model.check(*args)


def _check_num_tensors(check: Callable[..., Any], args: tuple[Table, ...]) -> None:
    """Raise unless the number of tensors is that of the arguments of the model's ``check``."""
    try:
        inspect.signature(check).bind(*args)
    except TypeError:
        expected = ", ".join(inspect.signature(check).parameters)
        raise TypeError(
            f"expected all data ({expected}), got {len(args)} tensor(s); pass batch_size for mini-batches with indices"
        ) from None


def _make_svi(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loss: ELBO | None,
    optim: PyroOptim | Sequence[Block] | None,
    *,
    compile: Compile,
) -> CheckedSVI | BlockCoordinateVI:
    if loss is not None and not isinstance(loss, ELBO):
        raise TypeError(f"expected loss to be a bound, got {loss!r}; make one of the class, such as Trace_ELBO()")
    if optim is None or isinstance(optim, PyroOptim):
        bound = loss or Trace_ELBO()
        return CheckedSVI(model, guide, optim or JointAdam(), make_bound(bound, compile) if compile else bound)
    if not isinstance(optim, Sequence):
        raise TypeError(
            f"expected optim to be a Pyro optimiser or a list of blocks, got {type(optim).__name__}; use "
            "JointOptim(torch.optim.SGD, {'lr': 0.01}), for example, for an optimiser of torch"
        )
    bound = loss or TraceMeanField_ELBO()
    return BlockCoordinateVI(model, guide, optim, loss=make_bound(bound, compile) if compile else bound)
