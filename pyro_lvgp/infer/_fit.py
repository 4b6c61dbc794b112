"""Training loop of variational inference."""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from pyro.optim import PyroOptim

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.representation import display_name
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.tables import Table
from pyro_lvgp.infer._compile_setting import Compile
from pyro_lvgp.infer._fit_result import FitResult
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.block import Block
from pyro_lvgp.infer.callbacks import Callback, ProgressBar, StopOnConvergence
from pyro_lvgp.infer.callbacks._interrupts import StopOnInterrupt
from pyro_lvgp.infer.callbacks._validation import ValidateFirstEpoch

__all__ = ["fit"]

_LOG = logging.getLogger("pyro_lvgp")
MAX_STEPS = 100_000  # of a fit that ends when the bound has converged


@torch.inference_mode(False)  # a fit takes gradients wherever it is called
@names_types
@pyro_lock
def fit(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Table,
    loss: ELBO | None = None,
    optim: PyroOptim | Sequence[Block] | None = None,
    num_steps: int | Literal["auto"] = 1000,
    batch_size: int | None = None,
    callbacks: Sequence[Callback] = (),
    compile: Compile = "auto",
    seed: int | None = 0,
    progress: bool = True,
) -> FitResult:
    """Maximise a bound by stochastic gradients, or block by block.

    Each step is ``SVI.step(*args)``, or that of :class:`~pyro_lvgp.infer.BlockCoordinateVI`.  Mini-batches are drawn at random
    without replacement; a step then is ``step(*(arg[idx] for arg in args), idx)``, or ``step(*model.mini_batch(idx, *args))``
    if the model has such a method.

    After Ctrl-C the fit stops at the end of the present step, and after a second Ctrl-C at once, but for imports, which take
    a third one, and checkpoints, which are read or written to the end.  Model and guide then have the parameters of the last
    step, or with :class:`~pyro_lvgp.infer.EarlyStopping` the best ones.  ``KeyboardInterrupt`` is raised only by a second
    Ctrl-C before the first step.

    A fit that takes all its steps warns with scikit-learn's ``ConvergenceWarning`` if the bound still rises at the end: if
    :attr:`FitResult.gain`, the rise over the last tenth of the steps, is at least two standard errors and at least 0.001 nats
    per observed entry.  There is no warning after fewer than 500 steps or 40 epochs, after Ctrl-C, or with
    :class:`~pyro_lvgp.infer.EarlyStopping`, whose score decides when to stop.

    Fits in several threads run one after the other, under :data:`~pyro_lvgp.infer.pyro_lock`.

    Pyro's validation, if enabled, is active in the first epoch alone, or in the first step without mini-batches or with
    ``compile=True``.  Devices and dtypes are those of model, guide and data: call ``model.to(...)`` and ``Y.to(...)`` first.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param args: arguments of both: tensors with a row for each datum; NaN marks missing entries of the last.  Models of rows
        take tables too (:func:`~pyro_lvgp.tables.as_tensor`).  Without
        mini-batches, tensors without dimensions too.
    :param loss: bound to maximise; ``Trace_ELBO()`` by default, or ``TraceMeanField_ELBO()`` with blocks.
    :param optim: a Pyro optimiser, ``JointAdam(lr=0.01)`` by default; or a sequence of blocks of parameters that are
        updated in turn, each by its own optimiser or in closed form, such as ``guide.blocks()`` of a
        :class:`~pyro_lvgp.guides.RandomFeatureGuide`.  Each fit makes new optimisers of blocks, and counts sweeps for a
        ``damping`` from 0: to continue both, call ``step`` of a ``BlockCoordinateVI`` instead.
    :param num_steps: number of steps, or of sweeps through the blocks; ``"auto"`` stops by
        :class:`~pyro_lvgp.infer.StopOnConvergence` when the bound has converged, or after 100 000 steps.
    :param batch_size: number of rows in a mini-batch; None for all rows at every step.
    :param callbacks: list of :class:`~pyro_lvgp.infer.Callback`, such as :class:`~pyro_lvgp.infer.LRSchedule`,
        :class:`~pyro_lvgp.infer.EarlyStopping`, :class:`~pyro_lvgp.infer.Checkpoint` or
        :class:`~pyro_lvgp.infer.Distributed`.
    :param compile: run steps as one graph of tensor operations instead of through Pyro
        (:class:`~pyro_lvgp.infer.CompiledELBO`).  ``"torchscript"`` takes a second or two to record the graph.  Its operations
        then run without Python, several times faster where a step spends more time in Pyro than in arithmetic; on a CPU the
        results are those of eager steps to the last bit, but for rounding where entries are missing.  ``"auto"`` does this on
        a CPU for fits of 1000 steps or more, if model, guide, bound and callbacks are of this library, and runs other fits
        eagerly.  True, or ``"inductor"``, compiles
        the graph too, which takes seconds to minutes, and may make steps faster still.  Blocks are run eagerly under
        ``"auto"``, and those that have a ``loss`` of their own under every setting.
    :param seed: seed of this fit, which then does not change the global random state; None draws from the global state.
    :param progress: show a progress bar with the bound per observed entry.
    :returns: the history of the fit.
    :raises TypeError: if model or guide is a class, the data are no tensors or another number of them than the model takes,
        ``loss`` is no bound, ``optim`` is neither a Pyro optimiser nor a sequence of blocks, or a callback is no ``Callback``.
    :raises ValueError: if the model's ``check`` refuses the data, ``num_steps`` or ``batch_size`` is out of range, tensors
        have different numbers of rows under mini-batches, the bound, or with the default ``optim`` its gradient, is not finite
        (before any parameter changes), or operations to compile depend on the values of tensors.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import JointAdam, LRSchedule
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> options = {"optim": JointAdam(lr=0.02), "callbacks": [LRSchedule("cosine")]}
    >>> history = fit(model, MeanFieldGuide(model), Y, num_steps=5, batch_size=10, progress=False, **options)
    >>> len(history.losses)
    5
    """
    ends_at_convergence = num_steps == "auto"
    ordered = _in_order(callbacks, progress=progress, ends_at_convergence=ends_at_convergence)
    most_steps = MAX_STEPS if ends_at_convergence else num_steps
    settings: Any = {"num_steps": most_steps, "batch_size": batch_size, "compile": compile, "seed": seed}
    state = FitState(model, guide, *args, loss=loss, optim=optim, callbacks=ordered, **settings)
    with seeded(seed), ExitStack() as stack:
        stack.callback(state.clear_gradients)
        for callback in ordered:
            callback.on_start(state)
            stack.callback(callback.on_end, state)
        try:
            while not state.is_finished:
                state.take_step()
                for callback in ordered:
                    callback.on_step(state)
        except KeyboardInterrupt:
            state.history.interrupted = True
    _warn_if_rising(state)
    _log_end(state)
    return state.history


def _in_order(callbacks: Sequence[Callback], *, progress: bool, ends_at_convergence: bool) -> list[Callback]:
    """Return the callbacks of a fit, including those of every fit, in the order in which they are called."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise TypeError(
            f"expected callbacks to be a list, each a Callback, got {callbacks!r}; give callbacks=[Checkpoint(path)]"
        )
    of_every_fit: list[Callback] = [ValidateFirstEpoch(), StopOnInterrupt(), *([ProgressBar()] if progress else [])]
    if ends_at_convergence and not any(isinstance(callback, StopOnConvergence) for callback in callbacks):
        of_every_fit.append(StopOnConvergence())
    return sorted([*callbacks, *of_every_fit], key=lambda callback: callback.order)


def _log_end(state: FitState) -> None:
    """Write the end of a fit to the log, as a warning if Ctrl-C ended it."""
    history = state.history
    if state.processes.rank > 0:
        return
    if history.interrupted:
        _LOG.warning("interrupted after %d steps; model and guide have the parameters fitted so far", state.step)
    elif state.step:
        message = "fit of %s: %d steps in %.1f s, bound per entry %.4f at the last one"
        _LOG.info(message, display_name(state.model), state.step, history.seconds[-1], history.bounds_per_entry[-1])


def _warn_if_rising(state: FitState) -> None:
    """Warn if a fit took all its steps and the bound was still rising."""
    history = state.history
    is_excepted = history.interrupted or history.scores or state.processes.rank > 0
    if is_excepted or state.step < state.num_steps or (gain := history.gain) is None:
        return
    if gain.is_significant and gain.value >= history.tolerance:
        from sklearn.exceptions import ConvergenceWarning  # imported where it is used, since scikit-learn takes a second

        warnings.warn(
            f'the bound was still rising when the fit ended, by {gain}; take more steps (num_steps=...), or num_steps="auto" '
            "to stop when the bound has converged; a second call of fit continues",
            ConvergenceWarning,
            stacklevel=5,  # the caller of fit, which torch.inference_mode and pyro_lock wrap
        )
