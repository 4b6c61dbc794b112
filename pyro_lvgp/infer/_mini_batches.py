"""Rows for each step of a fit."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_lvgp._utils.distributed import Processes
from pyro_lvgp._utils.validation import check_sizes


class MiniBatches:
    """All rows for ever, or shuffled mini-batches; what is left at the end of a pass is dropped to keep their size fixed.

    Of several processes each has mini-batches of its own from one pass over the rows.

    :param args: tensors with a row for each datum.
    :param num_rows: number of rows.
    :param batch_size: rows in a mini-batch of a process; None for all at every step.
    :param processes: those that share the rows.
    :param take: the arguments of a step, given the indices of the rows and all tensors.
    :raises ValueError: if ``batch_size`` is out of range, or, without ``take``, tensors have other numbers of rows.

    >>> batches = MiniBatches((torch.arange(5.0),), 5, 2, Processes(False))
    >>> [len(rows) for _, (rows, idx) in zip(range(3), batches)]
    [2, 2, 2]
    """

    def __init__(
        self,
        args: tuple[Tensor, ...],
        num_rows: int,
        batch_size: int | None,
        processes: Processes,
        take: Callable[..., tuple[Tensor, ...]] | None = None,
    ):
        if batch_size is not None:
            check_sizes(least=0, batch_size=batch_size)
            batch_size = int(batch_size)  # of whatever integers
            most = num_rows // processes.size
            if not 1 <= batch_size <= most:
                each = f" for each of {processes.size} processes" if processes.size > 1 else ""
                raise ValueError(f"expected batch_size from 1 to {most}, the rows of the data{each}, got {batch_size}")
            if take is None and any(arg.shape[:1] != (num_rows,) for arg in args):
                raise ValueError(
                    f"expected {num_rows} rows in each tensor, to take mini-batches of, got shapes "
                    f"{[list(arg.shape) for arg in args]}; give the model what is no data by functools.partial"
                )
        self._args, self._num_rows, self._batch_size, self._take = args, num_rows, batch_size, take or _rows
        self._processes, self._waiting = processes, list[Tensor]()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        if self._batch_size is None:
            return self._args
        if not self._waiting:
            # Pyro does not index parameters by as many rows as there are, which so must come in order.
            order = torch.arange if self._batch_size == self._num_rows else torch.randperm
            shuffled = self._processes.of_first(order(self._num_rows, device=self._args[0].device)).split(self._batch_size)
            self._waiting = list(shuffled[self._processes.rank :: self._processes.size][: self.num_in_pass])
        return self._take(self._waiting.pop(0), *self._args)

    @property
    def num_in_pass(self) -> int:
        """Steps in which each row comes once, but for those dropped."""
        return 1 if self._batch_size is None else self._num_rows // (self._batch_size * self._processes.size)

    def example(self) -> tuple[Tensor, ...]:
        """The arguments of some step."""
        if self._batch_size is None:
            return self._args
        return self._take(torch.arange(self._batch_size, device=self._args[0].device), *self._args)

    def state_dict(self) -> dict[str, Any]:
        """What is left of the present pass."""
        return {"waiting": self._waiting, "num_rows": self._num_rows, "batch_size": self._batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what is left of a pass.

        :param state: what :meth:`state_dict` returned.
        :raises ValueError: for other numbers of rows.
        """
        sizes = state["num_rows"], state["batch_size"]
        if sizes != (self._num_rows, self._batch_size):
            raise ValueError(
                f"expected a checkpoint of {self._num_rows} rows with batch_size={self._batch_size}, got one of {sizes[0]} "
                f"with batch_size={sizes[1]}; give the data and settings that it was made with, or name another file"
            )
        self._waiting = state["waiting"]


def _rows(idx: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    """Some rows of all tensors, and which."""
    return (*(arg[idx] for arg in args), idx)
