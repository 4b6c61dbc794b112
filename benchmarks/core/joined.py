"""Functions that run in several processes joined by ``torch.distributed``."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing


def in_processes(work: Callable[[int], Any], number: int, *, threads: int = 1) -> list[Any]:
    """Call ``work(rank)`` in several processes, and return all results.

    :param work: function defined in a module, or a partial of one.
    :param number: number of processes, joined by gloo.
    :param threads: number of threads of each process.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pyro_lvgp.guides"])  # of which imports take seconds, once for all processes
        torch.multiprocessing.start_processes(
            _run_process, (work, number, threads, folder), nprocs=number, start_method="forkserver"
        )
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(number)]


def _run_process(rank: int, work: Callable[[int], Any], number: int, threads: int, folder: str) -> None:
    """Join the processes, call the function, and save its result in the folder."""
    torch.set_num_threads(threads)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)
    torch.save(work(rank), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # an ordinary exit may be aborted by threads of gloo
