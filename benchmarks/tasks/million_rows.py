"""A million memory-mapped rows on one core: seconds of initial values, minutes of an epoch, memory over the epoch."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.memory import resident_megabytes
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide
from pyro_lvgp.infer import Callback, FitState, LazyAdam, MeanFieldELBO, fit
from pyro_lvgp.models import BayesianGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import ZeroImputation

NUM_THREADS, NUM_SEEDS = 1, 1
NUM_ROWS, DATA_DIM, LATENT_DIM, BATCH_SIZE, BLOCK = 1_000_000, 100, 5, 1000, 10_000
NUM_INDUCING, NUM_FREQUENCIES, NOISE, NUM_TESTED = 50, 50, 0.1, 1000
QUICK_ROWS = 4000
PUBLISHED: list[Row] = []
NOTES = f"""\
Sines of two latents with noise of standard deviation {NOISE}, in {DATA_DIM} columns, float32, written to a file block by
block and memory-mapped: a fit reads the rows of its mini-batches of {BATCH_SIZE} from the file. "initialize" is the time of
initial values from all rows. Memory is the resident set without pages of files: at the first step, and its largest value in
the first and in the last tenth of the epoch. "RMSE" is that of the reconstruction of the first {NUM_TESTED} rows against the
sines without noise, after one epoch."""


def gplvm(Y: Tensor, *, own_latents: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Bayesian GPLVM, with a posterior for each row or an encoder."""
    model = BayesianGPLVM(len(Y), DATA_DIM, LATENT_DIM, num_inducing=NUM_INDUCING).initialize(Y)
    encoders = None if own_latents else {"X": ZeroImputation(DATA_DIM, LATENT_DIM)}
    return model, MeanFieldGuide(model, encoders=encoders), {"optim": LazyAdam(lr=0.01)}


def random_features(Y: Tensor) -> tuple[Any, Any, dict[str, Any]]:
    """Random features with an encoder, whose weights take steps along natural gradients."""
    model = RandomFeatureLVM(len(Y), DATA_DIM, LATENT_DIM, num_frequencies=NUM_FREQUENCIES).initialize(Y)
    guide = RandomFeatureGuide(model, weights="shared", encoders={"X": ZeroImputation(DATA_DIM, LATENT_DIM)})
    return model, guide, {"optim": guide.blocks(lr=0.01, damping=lambda sweep: (sweep + 10.0) ** -0.6)}


TASKS: dict[str, Callable[[Tensor], tuple[Any, Any, dict[str, Any]]]] = {
    "GPLVM, a posterior for each row": lambda Y: gplvm(Y, own_latents=True),
    "GPLVM, encoder": lambda Y: gplvm(Y, own_latents=False),
    "random features, encoder": random_features,
}


class Memory(Callback):
    """Megabytes after each step."""

    def __init__(self) -> None:
        self.megabytes = list[float]()

    def on_step(self, state: FitState) -> None:
        self.megabytes.append(resident_megabytes(of_files=False))


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Fit each model, or one, for an epoch."""
    num_rows = QUICK_ROWS if quick else NUM_ROWS
    for seed in range(seeds):
        with TemporaryDirectory() as folder:
            path = Path(folder, "rows.npy")
            clean = write_rows(path, num_rows, seed)
            for name in tqdm([only] if only else list(TASKS), unit="fit"):
                with isolated(seed):
                    yield from measure(name, path, clean)


def write_rows(path: Path, num_rows: int, seed: int) -> Float[Tensor, "T D"]:
    """Write the rows to a file, block by block, and return the first rows without noise."""
    random = np.random.default_rng(seed)
    slopes, phases = random.normal(size=(2, DATA_DIM)), random.uniform(0.0, 2.0 * np.pi, DATA_DIM)
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (num_rows, DATA_DIM))
    first = torch.empty(0)
    for start in range(0, num_rows, BLOCK):
        block = rows[start : start + BLOCK]
        sines = np.sin(random.normal(size=(len(block), 2)) @ slopes + phases)
        block[:] = sines + NOISE * random.normal(size=block.shape)
        if start == 0:
            first = torch.as_tensor(sines[:NUM_TESTED], dtype=torch.float32)
    rows.flush()
    return first


def measure(name: str, path: Path, clean: Float[Tensor, "T D"]) -> Iterator[Measurement]:
    """Fit a model for an epoch, and yield its seconds, its memory and its error."""
    Y = torch.from_numpy(np.load(path, mmap_mode="c"))  # "c": PyTorch wants arrays that may be written to
    start = time.perf_counter()
    model, guide, options = TASKS[name](Y)
    initialized = time.perf_counter()
    memory, num_steps = Memory(), len(Y) // BATCH_SIZE
    options |= {"loss": MeanFieldELBO(num_samples=1, max_plate_nesting=1), "callbacks": [memory], "progress": False}
    fit(model, guide, Y, num_steps=num_steps, batch_size=BATCH_SIZE, **options)
    end = time.perf_counter()
    idx = torch.arange(len(clean))
    predicted = model.reconstruct(guide, Y[: len(clean)], idx)
    tenth = max(num_steps // 10, 1)
    values = {
        "initialize [s]": initialized - start,
        "epoch [min]": (end - initialized) / 60.0,
        "memory, first step [MB]": memory.megabytes[0],
        "first tenth [MB]": max(memory.megabytes[:tenth]),
        "last tenth [MB]": max(memory.megabytes[-tenth:]),
        "RMSE": float((predicted.mean - clean).square().mean().sqrt()),
    }
    settings: Settings = {"rows": len(Y), "columns": DATA_DIM, "latents": LATENT_DIM, "batch": BATCH_SIZE}
    for metric, value in values.items():
        yield Measurement(f"{len(Y)} rows", name, metric, value, end - start, settings)
