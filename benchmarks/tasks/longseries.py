"""Cost of a training step on long series: seconds and memory by number of points, dense, state-space and sparse."""

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.guides.structured import Method
from pyro_lvgp.infer import MeanFieldELBO, StructuredELBO
from pyro_lvgp.infer.elbo.base import DifferentiableELBO
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet

LATENT_DIM, DATA_DIM, LENGTHSCALE, NUM_INDUCING, MISSING = 2, 4, 20.0, 200, 0.3
NUM_THREADS = 1
DATASET, GROWTH = "GP-VAE of N points", "growth with N"
SECONDS, MEMORY, BOUND = "step [s]", "peak memory [MB]", "negative bound [nats/point]"
SETTINGS: Settings = {
    "kernel": f"Matérn-3/2, lengthscale {LENGTHSCALE:g} points",
    "Q": LATENT_DIM,
    "D": DATA_DIM,
    "missing": f"{MISSING:.0%}",
    "dtype": "float64",
    "device": "cpu",
}
PUBLISHED: list[Row] = []
NOTES = f"""\
A step evaluates the bound on all points and its gradients, with one draw, at the initial parameters, which are the same for
all methods. Memory is the largest size of all tensors alive at once during the forward and backward pass, beyond those before
the step. Growth is the exponent of N, the slope of logarithms over the three largest sizes. The bounds of the dense and of the
state-space method are equal. The sparse method has {NUM_INDUCING} inducing points, evenly spaced, for all N, so that its
approximation becomes coarser as N grows."""


class Fit(NamedTuple):
    """Model, guide and bound of a training step."""

    model: Any
    guide: Any
    loss: DifferentiableELBO


def structured(method: Method) -> Callable[[Tensor], Fit]:
    """GPVAE with a structured posterior computed by the given method."""

    def make(t: Tensor) -> Fit:
        model = GPVAE(kernel(), MLP(LATENT_DIM, DATA_DIM, (20,)), Gaussian(0.1)).double()
        guide = StructuredGPGuide(model, encoders={"f": IndexNet(DATA_DIM, LATENT_DIM).double()}, method=method)
        return Fit(model, guide, StructuredELBO(max_plate_nesting=1))

    return make


def sparse(t: Tensor) -> Fit:
    """SparseGPVAE with sites on the functions, projected on the inducing points."""
    inducing_points = torch.linspace(float(t[0]), float(t[-1]), NUM_INDUCING).double()[:, None]
    model = SparseGPVAE(kernel(), MLP(LATENT_DIM, DATA_DIM, (20,)), inducing_points, Gaussian(0.1)).double()
    guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(DATA_DIM, LATENT_DIM).double()})
    return Fit(model, guide, MeanFieldELBO("points", num_samples=1, max_plate_nesting=1))


def kernel() -> Matern:
    """Kernel with a batch element for each latent."""
    return Matern(1, 1.5, lengthscale=LENGTHSCALE, batch_shape=(LATENT_DIM,))


class Task(NamedTuple):
    """Method, and the lengths of series at which it is measured."""

    make: Callable[[Tensor], Fit]
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]


SMALL, LARGE = (125, 250, 500), (3_000, 10_000, 30_000, 100_000)
TASKS = {
    "dense": Task(structured("dense"), (*SMALL, 1_000, 2_000), SMALL),
    "state-space": Task(structured("state-space"), (*SMALL, 1_000, 2_000, *LARGE), (*SMALL, 1_000, 3_000)),
    "sparse": Task(sparse, (1_000, *LARGE), (500, 1_000, 3_000)),
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure every method, or one, for each seed."""
    for name in TASKS if only is None else [only]:
        task = TASKS[name]
        sizes = task.quick_sizes if quick else task.sizes
        for seed in range(seeds):
            steps = [step(task.make, num, seed) for num in tqdm(sizes, desc=name, unit="size")]
            for num, values in zip(sizes, steps, strict=True):
                for metric, value in values.items():
                    yield Measurement(DATASET, f"{name}, N = {num:,}", metric, value, values[SECONDS], SETTINGS)
            for metric in (SECONDS, MEMORY):
                slope, _ = np.polyfit(np.log(sizes[-3:]), np.log([values[metric] for values in steps[-3:]]), 1)
                settings: Settings = {"sizes": ", ".join(map(str, sizes[-3:]))}
                yield Measurement(GROWTH, name, f"exponent of {metric}", slope, sum(v[SECONDS] for v in steps), settings)


def step(make: Callable[[Tensor], Fit], num: int, seed: int) -> dict[str, float]:
    """Seconds, memory and bound of a training step on a series of the given length."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    t = torch.arange(num, dtype=torch.float64)[:, None]
    wave = torch.sin(t / LENGTHSCALE + torch.arange(DATA_DIM))
    y = wave + 0.3 * torch.randn_like(wave)
    y[torch.rand(y.shape) < MISSING] = torch.nan
    fit = make(t)
    fit.guide(t, y)
    parameters = [*fit.model.parameters(), *fit.guide.parameters()]

    def take() -> float:
        pyro.set_rng_seed(seed)
        loss = fit.loss.differentiable_loss(fit.model, fit.guide, t, y)
        torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss.item() / num

    with PeakMemory() as memory:
        bound = take()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 1.0 and len(seconds) < 20):
        start = time.perf_counter()
        take()
        seconds.append(time.perf_counter() - start)
    return {SECONDS: float(np.median(seconds)), MEMORY: memory.peak / 1e6, BOUND: bound}


class PeakMemory(TorchDispatchMode):
    """Peak of the bytes of all tensors that were created in the context and are alive.

    >>> with PeakMemory() as memory:
    ...     x = torch.ones(1000)
    ...     y = x.exp() + 1.0
    >>> memory.peak
    12000
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _freed(self, num_bytes: int) -> None:
        self._now -= num_bytes
