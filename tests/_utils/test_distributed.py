"""Means and broadcasts over two processes."""

import torch
from torch import Tensor

from benchmarks.core.joined import in_processes
from pyro_lvgp._utils.distributed import ProcessGroup

NUM_PROCESSES = 2


def averaged(rank: int) -> tuple[list[Tensor | None], tuple[float, bool, bool], Tensor, str]:
    processes = ProcessGroup(joined=True)
    params = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    params.append(torch.zeros(1, 2, dtype=torch.float64, requires_grad=True))
    params[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
    if rank == 1:
        params[1].grad = torch.tensor([4.0, 6.0])
    params[3].grad = torch.full((1, 2), float(rank), dtype=torch.float64)
    processes.average_gradients(params)
    start = torch.full((2,), float(rank))
    processes.broadcast_parameters({"x": start})
    message = ""
    try:
        processes.broadcast_parameters({"y": torch.zeros(1 + rank)})
    except ValueError as error:
        message = str(error)
    together = processes.mean(float(rank)), processes.any(rank == 1), processes.any(False)
    return [param.grad for param in params], together, start, message


def test_means_over_processes():
    for gradients, together, start, message in in_processes(averaged, NUM_PROCESSES):
        first, second, third, fourth = (None if gradient is None else gradient.tolist() for gradient in gradients)
        assert first == [1.5, 3.0]
        assert second == [2.0, 3.0]  # none in one process
        assert third is None  # none in any
        assert fourth == [[0.5, 0.5]]
        assert gradients[3].dtype == torch.float64
        assert together == (0.5, True, False)
        assert start.tolist() == [0.0, 0.0]
        assert "expected the same parameters in all processes" in message
