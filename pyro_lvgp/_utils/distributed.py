"""Communication between the processes of a distributed fit, by ``torch.distributed``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """Group of the processes of a fit: this process alone, or all processes of ``torch.distributed``.

    :param joined: use all processes of ``torch.distributed``, each of which must make the same calls in the same order.
    :raises RuntimeError: if ``joined`` and ``torch.distributed`` is not initialised.

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
        """Compute the mean of a number over all processes.

        :param value: number of this process.
        """
        if self.size == 1:
            return value
        # NCCL supports GPU tensors only.
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

        :param tensor: a tensor of the same shape in all processes.
        """
        if self.size > 1:
            with _others_answer():
                dist.broadcast(tensor, src=0)
        return tensor

    def average_gradients(self, params: Sequence[Tensor]) -> None:
        """Replace gradients by their means over processes, in one message for each device and dtype.

        The gradient of a parameter that has none in this process counts as zero.  A parameter that has none in any process
        keeps none.

        :param params: the same parameters in the same order in each process.
        """
        if self.size == 1:
            return
        for _, group in groupby(sorted(params, key=_device_and_dtype), key=_device_and_dtype):
            group_params = list(group)
            gradients = [torch.zeros_like(param) if param.grad is None else param.grad for param in group_params]
            used = gradients[0].new_tensor([param.grad is not None for param in group_params])
            message = torch.cat([used, *(gradient.flatten() for gradient in gradients)])
            self._all_reduce_mean_(message)
            used, *means = message.split([len(group_params), *(param.numel() for param in group_params)])
            for param, mean, share in zip(group_params, means, used.tolist(), strict=True):
                param.grad = mean.view_as(param) if share > 0.0 else None

    def broadcast_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Set the parameters of all processes to the values in the first process.

        :param params: parameters by name.
        :raises ValueError: if processes have parameters of other names, shapes or dtypes.
        """
        if self.size == 1:
            return
        own = {name: (list(param.shape), param.dtype) for name, param in params.items()}
        gathered: list[Any] = [None] * self.size
        with _others_answer():
            dist.all_gather_object(gathered, own)
        if others := [rank for rank, found in enumerate(gathered) if found != gathered[0]]:
            raise ValueError(
                f"expected the same parameters in all processes, got {gathered[0]} in the first and {gathered[others[0]]} in "
                f"process {others[0]}; create the same model and guide in all processes"
            )
        for param in params.values():
            self.broadcast(param.detach())

    def _all_reduce_mean_(self, message: Tensor) -> None:
        with _others_answer():
            dist.all_reduce(message)  # gloo has no ReduceOp.AVG
        message /= self.size


@contextmanager
def _others_answer() -> Iterator[None]:
    """Raise an error that says what to do if another process does not take part in a communication."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"expected a message of all processes of the fit, got {error}; if one of them was killed, or ended by an error, "
            "which it printed, start all processes again: with a Checkpoint the fit continues from its last file"
        ) from error


def _device_and_dtype(param: Tensor) -> tuple[str, str]:
    return str(param.device), str(param.dtype)
