"""Processes that fit one model together, by ``torch.distributed``."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """The processes of a fit: this one alone, or all those that ``torch.distributed`` joins.

    :param joined: whether all joined processes take part; then each must make the same calls in the same order.
    :raises RuntimeError: if they should, and ``torch.distributed`` is not initialised.

    >>> alone = ProcessGroup()
    >>> alone.rank, alone.size, alone.mean(2.0), alone.any(False)
    (0, 1, 2.0, False)
    """

    def __init__(self, *, joined: bool = False):
        if joined and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "expected processes joined by torch.distributed, got one alone; start the script by torchrun, and call "
                "torch.distributed.init_process_group() in it first"
            )
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)

    def mean(self, value: float) -> float:
        """Mean of a number over all processes.

        :param value: number of this process.
        """
        if self.size == 1:
            return value
        # NCCL takes tensors on GPUs only.
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        message = torch.tensor(value, dtype=torch.float64, device=device)
        self._all_reduce_mean_(message)
        return message.item()

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any process.

        :param flag: flag of this process.
        """
        return self.mean(float(flag)) > 0.0

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Write the values of the first process into the tensor, and return the tensor.

        :param tensor: of one shape in all processes.
        """
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def average_gradients(self, params: Sequence[Tensor]) -> None:
        """Replace gradients by their means over processes, in one message for each device and dtype.

        A parameter without a gradient counts as one with a gradient of zero, unless it has none in any process.

        :param params: the same in each process, in the same order.
        """
        if self.size == 1:
            return
        for _, group in groupby(sorted(params, key=_device_and_dtype), key=_device_and_dtype):
            alike = list(group)
            gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in alike]
            used = gradients[0].new_tensor([param.grad is not None for param in alike])
            message = torch.cat([used, *(gradient.flatten() for gradient in gradients)])
            self._all_reduce_mean_(message)
            used, *means = message.split([len(alike), *(param.numel() for param in alike)])
            for param, mean, share in zip(alike, means, used.tolist(), strict=True):
                param.grad = mean.view_as(param) if share > 0.0 else None

    def broadcast_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Give the parameters of all processes the values of the first.

        :param params: parameters by name.
        :raises ValueError: if processes have parameters of other names, shapes or dtypes.
        """
        if self.size == 1:
            return
        own = {name: (list(param.shape), param.dtype) for name, param in params.items()}
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, own)
        if others := [rank for rank, theirs in enumerate(of_all) if theirs != of_all[0]]:
            raise ValueError(
                f"expected the same parameters in all processes, got {of_all[0]} in the first and {of_all[others[0]]} in "
                f"process {others[0]}; make model and guide alike"
            )
        for param in params.values():
            self.broadcast(param.detach())

    def _all_reduce_mean_(self, message: Tensor) -> None:
        dist.all_reduce(message)  # gloo has no ReduceOp.AVG
        message /= self.size


def _device_and_dtype(param: Tensor) -> tuple[str, str]:
    return str(param.device), str(param.dtype)
