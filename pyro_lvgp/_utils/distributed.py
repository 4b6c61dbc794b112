"""Processes that fit one model together, by ``torch.distributed``."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Processes:
    """The processes of a fit: all those that ``torchrun`` started, or this one alone.

    :param together: whether all take part; then each must make the same calls in the same order.
    :raises RuntimeError: if they should, and are not joined by ``torch.distributed``.

    >>> alone = Processes(False)
    >>> alone.rank, alone.size, alone.mean(2.0), alone.any(False)
    (0, 1, 2.0, False)
    """

    def __init__(self, together: bool):
        if together and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "expected processes joined by torch.distributed, got one alone; start the script by torchrun, and call "
                "torch.distributed.init_process_group() in it first"
            )
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    def mean(self, value: float) -> float:
        """Mean of a number over all processes.

        :param value: that of this one.
        """
        if self.size == 1:
            return value
        # NCCL takes tensors on GPUs only.
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        message = torch.tensor(value, dtype=torch.float64, device=device)
        self._average_(message)
        return message.item()

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any process.

        :param flag: that of this one.
        """
        return self.mean(float(flag)) > 0.0

    def of_first(self, tensor: Tensor) -> Tensor:
        """What the first process has, written into the tensor.

        :param tensor: of one shape in all processes.
        """
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def average_gradients(self, params: Sequence[Tensor]) -> None:
        """Put means over processes in the place of gradients, by one message for each device and dtype.

        A parameter without a gradient has a gradient of zero, unless it has none in any process.

        :param params: the same in each process, in the same order.
        """
        if self.size == 1:
            return
        for _, group in groupby(sorted(params, key=_kind), key=_kind):
            alike = list(group)
            gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in alike]
            used = gradients[0].new_tensor([param.grad is not None for param in alike])
            message = torch.cat([used, *(gradient.flatten() for gradient in gradients)])
            self._average_(message)
            used, *means = message.split([len(alike), *(param.numel() for param in alike)])
            for param, mean, share in zip(alike, means, used.tolist(), strict=True):
                param.grad = mean.view_as(param) if share > 0.0 else None

    def make_alike(self, params: Mapping[str, Tensor]) -> bool:
        """Give all processes the values that the first has.

        :param params: parameters by name.
        :returns: whether all had them already.
        :raises ValueError: if processes have other parameters.
        """
        if self.size == 1:
            return True
        own = {name: (list(param.shape), param.dtype) for name, param in params.items()}
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, own)
        if other := [rank for rank, theirs in enumerate(of_all) if theirs != of_all[0]]:
            raise ValueError(
                f"expected the same parameters in all processes, got {of_all[0]} in the first and {of_all[other[0]]} in "
                f"process {other[0]}; make model and guide alike"
            )
        before = [param.detach().clone() for param in params.values()]
        for param in params.values():
            self.of_first(param.detach())
        return not self.any(not all(map(torch.equal, before, params.values())))

    def _average_(self, message: Tensor) -> None:
        dist.all_reduce(message)
        message /= self.size


def _kind(param: Tensor) -> tuple[str, str]:
    return str(param.device), str(param.dtype)
