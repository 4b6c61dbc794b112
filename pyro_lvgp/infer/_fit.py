"""The loop around SVI: progress, mini-batches, seeds, and nothing lost on Ctrl-C."""

import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyro
import torch
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_lvgp._utils.distributed import Processes
from pyro_lvgp._utils.interrupts import Interrupts
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_bound, check_sizes, check_tensors
from pyro_lvgp.infer._mini_batches import MiniBatches
from pyro_lvgp.infer.block import Block
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.callbacks.checkpoint import Checkpoint, OptimizerState, RandomState, Stateful, Tensors
from pyro_lvgp.infer.callbacks.early_stopping import EarlyStopping, Watch
from pyro_lvgp.infer.callbacks.progress import Progress
from pyro_lvgp.infer.elbo.compiled import CompiledELBO
from pyro_lvgp.infer.optim import JointOptim

Schedule = Literal["constant", "cosine"] | Callable[[int], float]
_CLIP_FACTOR = 10.0  # a step that one rare draw makes longer can undo hundreds of others


@dataclass
class FitResult:
    """History of a fit.

    :param losses: minus the bound, in nats for all data, estimated at each step.
    :param seconds: seconds since the start, after each step.
    :param num_entries: number of observed entries of the data, to divide by.
    :param interrupted: whether Ctrl-C ended the fit early.
    :param scores: under a rule to stop early, numbers of steps taken and the scores then.
    """

    num_entries: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    interrupted: bool = False
    scores: list[tuple[int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Losses and seconds."""
        return {"losses": self.losses, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        :param state: what :meth:`state_dict` returned.
        """
        self.losses, self.seconds = state["losses"], state["seconds"]

    @property
    def bounds_per_entry(self) -> np.ndarray:
        """The bound per observed entry, in nats, at each step."""
        return -np.asarray(self.losses) / self.num_entries


@torch.inference_mode(False)  # a fit takes gradients wherever it is called
def fit(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Tensor,
    loss: ELBO | None = None,
    num_steps: int = 1000,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    schedule: Schedule | None = None,
    optim: PyroOptim | None = None,
    blocks: Sequence[Block] | None = None,
    compile: bool = False,
    seed: int | None = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    callback: Callable[[int, float], None] | None = None,
    early_stopping: EarlyStopping | None = None,
    distributed: bool = False,
    checkpoint: Checkpoint | None = None,
) -> FitResult:
    """Climb a bound by stochastic gradients, or block by block.

    Runs ``SVI.step(*args)``, or that of :class:`~pyro_lvgp.infer.BlockCoordinateVI`; with mini-batches, random and without
    replacement, ``step(*(arg[idx] for arg in args), idx)``, or with what ``model.mini_batch(idx, *args)`` returns.
    On Ctrl-C the fit stops after its present step, on another at once, and what was learned stays in model and guide; under
    ``early_stopping``, the best of it.
    If Pyro's validation is on, it checks the first step, or with mini-batches (not compiled) the first pass over the rows,
    and is off for the rest of the fit.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param args: tensors to call both with, with a row for each datum; NaN marks missing entries of the last.  Without
        mini-batches, single numbers too.
    :param loss: bound to climb; ``Trace_ELBO()`` by default, or that of ``BlockCoordinateVI``.
    :param num_steps: number of steps, or of sweeps through the blocks.
    :param batch_size: rows in a mini-batch; None for all rows at every step.
    :param learning_rate: of Adam, 0.01 by default, which clips gradients of more than ten times their usual norm.
    :param schedule: ``"constant"`` by default; ``"cosine"`` lowers the learning rate to zero, that of all blocks with an
        optimiser too; a function maps the step to a factor.
    :param optim: an optimiser of your own instead; ``learning_rate`` and ``schedule`` are then not used.
    :param blocks: blocks of parameters that move in turn, each by an optimiser of its own or in closed form, such as
        ``guide.blocks()`` of a :class:`~pyro_lvgp.guides.RandomFeatureGuide`, which takes a learning rate itself.  Each fit
        makes the optimisers anew, and counts sweeps for a ``damping`` from 0: keep a ``BlockCoordinateVI`` to go on with both.
    :param compile: compile the bound and its gradients into one graph (:class:`~pyro_lvgp.infer.CompiledELBO`), with blocks
        those of the blocks without a bound of their own.  It takes seconds to minutes at the second step, and pays where many
        steps follow that spend their time in Pyro rather than in arithmetic.
    :param seed: seed of this fit, which leaves the global random state alone; None to use and advance that.
    :param device: move model, guide and data there first.
    :param dtype: convert model, guide and data first.
    :param progress: show a progress bar with the bound per observed entry.
    :param callback: called with the step and its loss.
    :param early_stopping: a score to watch; the fit ends in the state that had the lowest.
    :param distributed: fit in all processes that ``torch.distributed`` joins, each of which calls this with the same settings.
        Steps move the parameters of the first, in all of them, along the mean of their gradients.  They share the rows of a
        pass, and have draws of their own, seeded by ``seed`` plus the rank.  Losses and scores are means too.
    :param checkpoint: a file to write the state to every so often, and to go on from if it is there.
    :returns: the history.
    :raises TypeError: if model or guide is a class, the data are no tensors, or more or fewer than the model takes, ``loss``
        is no bound, ``early_stopping`` no ``EarlyStopping``, or ``checkpoint`` no ``Checkpoint``.
    :raises ValueError: if the data are unfit for the model, ``num_steps`` or ``batch_size`` is out of range, ``schedule`` is
        unknown or that of a block too, ``optim``, ``learning_rate`` or ``distributed`` is given beside ``blocks``, only one of
        fit and ``optim`` is ``distributed``, tensors have different numbers of rows under mini-batches, the bound, or without
        ``optim`` and ``blocks`` its gradient, is not finite (before anything is moved by it), the score becomes NaN, or what
        is to be compiled depends on the values of tensors, or a checkpoint is of another fit or cannot be read.
    :raises RuntimeError: if no processes are joined though ``distributed`` asks for them, or their checkpoints are of
        different steps.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> history = fit(model, MeanFieldGuide(model), Y, num_steps=5, batch_size=10, progress=False)
    >>> len(history.losses)
    5
    """
    check_sizes(least=0, num_steps=num_steps)
    check_tensors(args)
    args = tuple(arg.clone() if arg.is_inference() else arg for arg in args)  # gradients do not pass by others
    args = tuple(arg.to(device=device, dtype=dtype if arg.is_floating_point() else None) for arg in args)
    for module in (model, guide):
        if isinstance(module, type):
            raise TypeError(
                f"expected a model and its guide, got the class {module.__name__}; make one: {module.__name__}(...)"
            )
        if isinstance(module, nn.Module) and (device is not None or dtype is not None):
            module.to(device=device, dtype=dtype)
    if callable(check := getattr(model, "check", None)):
        _check_number(check, args)
        check(*args)
    tables = [arg for arg in args if arg.dim()] or [torch.empty(0)]
    data = next((arg for arg in reversed(tables) if arg.is_floating_point()), tables[-1])
    processes = Processes(distributed)
    batches = MiniBatches(args, len(data), batch_size, processes, getattr(model, "mini_batch", None))
    if early_stopping is not None and not isinstance(early_stopping, EarlyStopping):
        raise TypeError(f"expected early_stopping to be EarlyStopping(score), got {early_stopping!r}; give it a score")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"expected checkpoint to be Checkpoint(path), got {checkpoint!r}")
    how: Any = {"learning_rate": learning_rate, "schedule": schedule, "optim": optim, "blocks": blocks, "compile": compile}
    svi = _climber(model, guide, loss, num_steps, distributed=distributed, **how)
    watch = Watch(early_stopping, (model, guide), processes)
    result = FitResult(scores=watch.scores, num_entries=int((~torch.isnan(data)).sum()) if len(data) else 1)
    optimizer = svi if isinstance(svi, BlockCoordinateVI) else OptimizerState(svi.optim)
    parts: dict[str, Stateful] = {  # model and guide stay as they are if what comes before them does not fit
        "batches": batches,
        "blocks" if isinstance(optimizer, BlockCoordinateVI) else optimizer.kind: optimizer,
        "tensors": Tensors(model, guide, batches.example),
        "history": result,
        "watch": watch,
        "random": RandomState(),
    }
    if checkpoint is not None and processes.size > 1:
        checkpoint = replace(checkpoint, path=f"{os.fspath(checkpoint.path)}.{processes.rank}")
    first_pass = 1 if compile else batches.num_in_pass
    with (
        seeded(None if seed is None else seed + processes.rank),
        ExitStack() as unchecked,
        Progress(num_steps, result.num_entries, shown=progress and processes.rank == 0) as bar,
        Interrupts() as interrupts,
    ):
        if checkpoint is not None and checkpoint.exists:
            svi.evaluate_loss(*batches.example())  # bounds and guides may draw random numbers at their first call
            checkpoint.read(parts)
        done = len(result.losses)
        if processes.any(processes.mean(float(done)) != done):
            raise RuntimeError(f"expected checkpoints of one step in all processes, got one of step {done} here; remove them")
        bar.start_at(done)
        start = time.perf_counter() - (result.seconds[-1] if done else 0.0)
        try:
            for step, batch in zip(range(done, done if watch.has_ended else num_steps), batches, strict=False):
                value = processes.mean(float(svi.step(*batch)))
                if step + 1 == max(first_pass, done + 1):
                    unchecked.enter_context(pyro.validation_enabled(False))
                result.losses.append(value)
                result.seconds.append(time.perf_counter() - start)
                if callback is not None:
                    callback(step, value)
                bar.advance(value, " (compiling)" if compile and step == done else "")
                is_last = step + 1 == num_steps
                watch.look(step + 1, is_last=is_last)
                came = processes.any(interrupts.came)
                if checkpoint is not None and (is_last or watch.has_ended or came or (step + 1) % checkpoint.every == 0):
                    checkpoint.write(parts)
                if came:
                    raise KeyboardInterrupt
                if watch.has_ended:
                    break
        except KeyboardInterrupt:
            result.interrupted = True
            if processes.rank == 0:
                bar.say(f"interrupted after {len(result.losses)} steps; what was learned is kept")
        finally:
            watch.restore()
            for tensor in watch.state():  # whatever ended a step may have left a gradient to the next fit
                tensor.grad = None
    return result


def _climber(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loss: ELBO | None,
    num_steps: int,
    *,
    learning_rate: float | None,
    schedule: Schedule | None,
    optim: PyroOptim | None,
    blocks: Sequence[Block] | None,
    compile: bool,
    distributed: bool,
) -> SVI | BlockCoordinateVI:
    """What takes the steps: of all parameters at once, or block by block."""
    factor = _factor("constant" if schedule is None else schedule, num_steps)
    if loss is not None and not isinstance(loss, ELBO):
        raise TypeError(f"expected loss to be a bound, got {loss!r}; make one of the class, such as Trace_ELBO()")
    if distributed and blocks is not None:
        raise ValueError(
            "expected gradients of all parameters, to average over processes, got blocks; leave one of the two out"
        )
    if optim is not None and distributed != getattr(optim, "distributed", False):
        raise ValueError(
            "expected fit and its optimiser to be of one process or of several alike, got distributed=True for one only; give "
            "it to both, fit and JointOptim, or to neither"
        )
    if blocks is not None:
        if optim is not None:
            raise ValueError("expected an optimiser or blocks, got both; give each block an optimiser of its own")
        if learning_rate is not None:
            raise ValueError(
                "expected blocks alone, which have optimisers of their own, got learning_rate too; set it in the blocks, as "
                "in guide.blocks(learning_rate=0.01)"
            )
        if factor is not None:
            blocks = [_scheduled(block, factor) for block in blocks]
        vi = BlockCoordinateVI(model, guide, blocks, loss=loss)
        if compile:
            vi.loss = CompiledELBO(vi.loss)
        return vi
    if optim is None:
        adam = {"lr": 0.01 if learning_rate is None else learning_rate, "fused": True}
        optim = JointOptim(torch.optim.Adam, adam, clip_factor=_CLIP_FACTOR, schedule=factor, distributed=distributed)
    bound = loss or Trace_ELBO()
    svi = SVI(model, guide, optim, CompiledELBO(bound) if compile else bound)
    svi.loss_and_grads = _refusing_infinite(svi.loss_and_grads)
    return svi


def _refusing_infinite(loss_and_grads: Callable[..., Any]) -> Callable[..., float]:
    """A bound that raises where it is not finite, before an optimiser moves anything by its gradients."""

    def evaluate(*args: Any, **kwargs: Any) -> float:
        value = float(loss_and_grads(*args, **kwargs))
        check_bound(value)
        return value

    return evaluate


def _check_number(check: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    """Raise unless there are as many tensors as the model has data."""
    try:
        inspect.signature(check).bind(*args)
    except TypeError:
        expected = ", ".join(inspect.signature(check).parameters)
        raise TypeError(
            f"expected all data ({expected}), got {len(args)} tensor(s); mini-batches and their indices come by batch_size"
        ) from None


def _scheduled(block: Block, factor: Callable[[int], float]) -> Block:
    """The block with a schedule, if it moves by gradient."""
    if block.schedule is not None:
        raise ValueError(f"expected one schedule, got one of the fit and one of block {block.name!r}; leave one out")
    return block if block.optim is None else replace(block, schedule=factor)


def _factor(schedule: Schedule, num_steps: int) -> Callable[[int], float] | None:
    if callable(schedule):
        return schedule
    if schedule == "constant":
        return None
    if schedule == "cosine":
        return lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / num_steps, 1.0)))
    raise ValueError(f'expected schedule "constant", "cosine" or a function of the step, got {schedule!r}')
