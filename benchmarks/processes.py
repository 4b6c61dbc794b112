"""One fit in two processes, or in one with one thread or two: milliseconds of a step, and the bound reached."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed
import torch.multiprocessing
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import Measurement, Row, Settings
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import MeanFieldELBO
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.networks import ZeroImputation
from pyro_lvgp.training import FitResult, fit

NUM_THREADS = 1
NUM_ROWS, LATENT_DIM, NUM_INDUCING = 4000, 10, 50
PUBLISHED: list[Row] = []
NOTES = """\
All 60 000 digits of MNIST, Q = 10, M = 50, mean field; each step sees 4000 rows, which two processes share.  They exchange the
gradients of all parameters by `fit(..., distributed=True)` and gloo: 2.2 million numbers with an encoder, of which 2.0 are of
q(u), and 3.2 million with latents of each row.  "step" is the mean over a fit after its first tenth, "bound" the mean of the
last tenth of its steps.  Start and rates are the same for all."""


class Setup(NamedTuple):
    """How many processes, and threads in each."""

    processes: int
    threads: int


SETUPS = {
    "1 process": Setup(1, 1),
    "1 process, 2 threads": Setup(1, 2),
    "2 processes": Setup(2, 1),
}


TASKS = {"latents of each row": False, "encoder": True}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all ways to share a step for each seed, by guide."""
    num_steps = 10 if quick else 50
    for task in [only] if only else list(TASKS):
        for name, setup in tqdm(SETUPS.items(), desc=task, unit="setup"):
            for seed in range(seeds):
                history = fitted(setup, TASKS[task], num_steps=num_steps, seed=seed)
                after, tenth = history.seconds, num_steps // 10
                values = {
                    "step [ms]": 1e3 * (after[-1] - after[tenth - 1]) / (num_steps - tenth),
                    "bound [nats/entry]": history.bounds_per_entry[-tenth:].mean().item(),
                }
                settings: Settings = {"steps": num_steps, "rows in a process": NUM_ROWS // setup.processes}
                for metric, value in values.items():
                    yield Measurement(task, name, metric, value, after[-1], settings)


def fitted(setup: Setup, has_encoder: bool, *, num_steps: int, seed: int) -> FitResult:
    """The history of a fit in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setup, has_encoder, num_steps, seed, folder)
        torch.multiprocessing.spawn(_fit_one, arguments, nprocs=setup.processes)
        return torch.load(Path(folder) / "history.pt", weights_only=False)


def _fit_one(rank: int, setup: Setup, has_encoder: bool, num_steps: int, seed: int, folder: str) -> None:
    torch.set_num_threads(setup.threads)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=setup.processes)
    Y = digits()
    model = BayesianGPLVM(len(Y), Y.shape[1], LATENT_DIM, num_inducing=NUM_INDUCING).initialize(Y, seed=seed)
    torch.manual_seed(seed)
    encoders = {"X": ZeroImputation(model.data_dim, LATENT_DIM, (100, 100))} if has_encoder else {}
    guide = MeanFieldGuide(model, encoders=encoders)
    history = fit(
        model,
        guide,
        Y,
        loss=MeanFieldELBO(num_samples=1),
        num_steps=num_steps,
        batch_size=NUM_ROWS // setup.processes,
        seed=seed,
        progress=False,
        distributed=True,
    )
    if rank == 0:
        torch.save(history, Path(folder) / "history.pt")
    torch.distributed.destroy_process_group()


def digits() -> Float[Tensor, "N D"]:
    """All digits, centred, with a mean square of one."""
    Y = torch.as_tensor(load_dataset("mnist")["X_train"], dtype=torch.float32).flatten(1)
    Y = Y - Y.mean(0)
    return Y / Y.square().mean().sqrt()
