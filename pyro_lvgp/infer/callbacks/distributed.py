"""Distributed fits in several processes of ``torch.distributed``."""

from torch import Tensor

from pyro_lvgp._utils.distributed import ProcessGroup
from pyro_lvgp._utils.seeding import forked, seed_all
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer._svi import CheckedSVI
from pyro_lvgp.infer.callbacks.base import Callback
from pyro_lvgp.infer.optim import LazyAdam

__all__ = ["Distributed"]


class Distributed(Callback):
    """Data-parallel fit in all processes of ``torch.distributed``; each process calls ``fit`` with the same settings.

    The fit starts from the parameters of the first process, and its steps use the mean of the gradients of all processes.  The
    mini-batches of an epoch are distributed among the processes.  Each process has its own draws, with ``seed`` plus its rank
    as seed.  Losses and scores are means over processes.  Ctrl-C in one process ends the fit of all.

    :raises RuntimeError: at the start, if ``torch.distributed`` is not initialised.
    :raises ValueError: at the start, with blocks, which have no gradient of all parameters; if there are fewer rows than the
        mini-batches of all processes need; if processes have different parameters.

    >>> Distributed().on_start(FitState(lambda: None, lambda: None, num_steps=0))  # without torchrun
    Traceback (most recent call last):
    RuntimeError: expected processes joined by torch.distributed, got one alone; start the script by torchrun, and call \
torch.distributed.init_process_group() in it first

    Source: Li et al. (2020), "PyTorch Distributed: experiences on accelerating data parallel training".
    """

    order = -2

    def on_start(self, state: FitState) -> None:
        """Broadcast the parameters of the first process, and average gradients from then on.

        :param state: the fit.
        """
        if not isinstance(state.svi, CheckedSVI) or isinstance(state.svi.optim, LazyAdam):
            got = "a LazyAdam" if isinstance(state.svi, CheckedSVI) else "blocks"
            raise ValueError(
                f"expected gradients of all parameters, to average over processes, got {got}; use another optimiser"
            )
        self._state, self._known = state, dict[Tensor, str]()
        state.processes = ProcessGroup(joined=True)
        state.batches.share(state.processes)
        state.history.steps_per_epoch = state.batches.steps_per_epoch
        if state.seed is not None:
            seed_all(state.seed + state.processes.rank)
        with forked():
            state.initialize_parameters()
        self._broadcast_new_parameters()
        state.svi.reduce_gradients = self._average_gradients

    def _average_gradients(self, params: list[Tensor]) -> list[Tensor]:
        """Average the gradients of a step over processes; return the parameters with a gradient in any of them."""
        used = set(params)
        for unused in self._known.keys() - used:
            unused.grad = None
        if not used <= self._known.keys():
            self._broadcast_new_parameters()
        self._state.processes.average_gradients(list(self._known))
        return [param for param in self._known if param.grad is not None]

    def _broadcast_new_parameters(self) -> None:
        """Broadcast new parameters of the first process, and remove gradients at other values."""
        new = {name: param for name, param in self._state.parameters().items() if param not in self._known}
        self._state.processes.broadcast_parameters(new)
        for name, param in new.items():
            self._known[param], param.grad = name, None
