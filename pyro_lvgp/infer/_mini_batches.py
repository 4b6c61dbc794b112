"""Mini-batches of a fit."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_lvgp._utils.distributed import ProcessGroup
from pyro_lvgp._utils.validation import check_sizes

__all__ = ["MiniBatches"]


class MiniBatches:
    """Endless iterator over the arguments of steps: all rows, or shuffled mini-batches of one size.

    Rows that do not fill a mini-batch at the end of an epoch are dropped.

    :param args: tensors with a row for each datum.
    :param num_rows: number of rows.
    :param batch_size: number of rows in a mini-batch of each process; None for all rows at every step.
    :param select: function of the indices of a mini-batch and all tensors that returns the arguments of a step; by default
        these rows of each tensor, and the indices.
    :raises ValueError: if ``batch_size`` is out of range, or, without ``select``, tensors have other numbers of rows.

    >>> batches = MiniBatches((torch.arange(5.0),), 5, 2)
    >>> [len(rows) for _, (rows, idx) in zip(range(3), batches)]
    [2, 2, 2]
    """

    def __init__(
        self,
        args: tuple[Tensor, ...],
        num_rows: int,
        batch_size: int | None,
        select: Callable[..., tuple[Tensor, ...]] | None = None,
    ):
        if batch_size is not None:
            check_sizes(least=0, batch_size=batch_size)
            batch_size = int(batch_size)  # from an integer of NumPy, for example
        self._args, self._num_rows, self._batch_size, self._select = args, num_rows, batch_size, select or _rows
        self._remaining = list[Tensor]()
        self.share(ProcessGroup())
        if batch_size is not None and select is None and any(arg.shape[:1] != (num_rows,) for arg in args):
            raise ValueError(
                f"expected {num_rows} rows in each tensor, to take mini-batches of, got shapes "
                f"{[list(arg.shape) for arg in args]}; pass tensors without rows to the model by functools.partial"
            )

    def share(self, processes: ProcessGroup) -> None:
        """Distribute the mini-batches of each epoch among processes.

        :param processes: the group of processes.
        :raises ValueError: if there are fewer rows than a mini-batch of each process needs.
        """
        largest = self._num_rows // processes.size
        if self._batch_size is not None and not 1 <= self._batch_size <= largest:
            each = f" for each of {processes.size} processes" if processes.size > 1 else ""
            raise ValueError(f"expected batch_size from 1 to {largest}, the rows of the data{each}, got {self._batch_size}")
        self._processes = processes

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        if self._batch_size is None:
            return self._args
        if not self._remaining:
            # A mini-batch of all rows must be in order, because Pyro then does not index parameters.
            order = torch.arange if self._batch_size == self._num_rows else torch.randperm
            shuffled = self._processes.broadcast(order(self._num_rows, device=self._args[0].device)).split(self._batch_size)
            self._remaining = list(shuffled[self._processes.rank :: self._processes.size][: self.steps_per_epoch])
        return self._select(self._remaining.pop(0), *self._args)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch, in which each row that is not dropped is used once."""
        return 1 if self._batch_size is None else self._num_rows // (self._batch_size * self._processes.size)

    def example(self) -> tuple[Tensor, ...]:
        """Return the arguments of a step on the first rows, without advancing the iterator."""
        if self._batch_size is None:
            return self._args
        return self._select(torch.arange(self._batch_size, device=self._args[0].device), *self._args)

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining mini-batches of the present epoch."""
        return {"remaining": self._remaining, "num_rows": self._num_rows, "batch_size": self._batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the remaining mini-batches of an epoch.

        :param state: returned by :meth:`state_dict`.
        :raises ValueError: if the data or the mini-batches of the state have another number of rows.
        """
        sizes = state["num_rows"], state["batch_size"]
        if sizes != (self._num_rows, self._batch_size):
            raise ValueError(
                f"expected a checkpoint of {self._num_rows} rows with batch_size={self._batch_size}, got one of {sizes[0]} "
                f"with batch_size={sizes[1]}; use the data and settings of the checkpoint, or another file"
            )
        self._remaining = state["remaining"]


def _rows(idx: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    """Return rows of all tensors, and their indices."""
    return (*(arg[idx] for arg in args), idx)
