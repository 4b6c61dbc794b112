"""Steps of models, guides and bounds with and without `CompiledELBO`: milliseconds, and after how many steps it pays."""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.infer import ELBO
from pyro.params.param_store import StateDict
from torch import Tensor
from tqdm import tqdm

from benchmarks import gpvae as gpvae_benchmark
from benchmarks.oilflow import standardised
from benchmarks.report import Measurement, Row, Settings
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide, SparseStructuredGPGuide, StructuredGPGuide
from pyro_lvgp.infer import CompiledELBO, ImportanceWeightedELBO, JointOptim, MeanFieldELBO, StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.models import GPVAE, BayesianGPLVM, SparseGPVAE
from pyro_lvgp.networks import MLP, IndexNet
from pyro_lvgp.seeding import seeded
from pyro_lvgp.training import fit

NUM_THREADS = 1
LEARNING_RATE, BATCH_SIZE = 1e-3, 200
PUBLISHED: list[Row] = []
NOTES = """\
Each model, guide and bound twice; medians of the steps of `fit`, of which blocks alternate between the two.  "compile" is what
the slowest step takes over the median, and "pays after" the number of steps whose savings make up for it; torch finds earlier
compilations on the disk, unless TORCHINDUCTOR_CACHE_DIR names an empty folder.  The Bayesian GPLVM is of oil flow: 1000 × 12,
mini-batches of 200, Q = 10, M = 30.  GP-VAEs are of the EEG: 256 × 7 with gaps, Q = 3, IndexNet, a decoder with one layer of
20; mini-batches of 100, as in the thesis, or all points and 30 inducing points.  The user's own model is Poisson factorisation
of 500 × 30 counts with a latent of 5 dimensions for each row, of which 100 make a mini-batch."""


class Case(NamedTuple):
    """What a fit needs."""

    model: Callable[..., Any]
    guide: Callable[..., Any]
    bound: ELBO
    args: tuple[Tensor, ...]
    batch_size: int | None


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Measure all cases for each seed."""
    for seed in range(seeds):
        for name, make in tqdm(CASES.items(), desc=f"compiled, seed {seed}", unit="case"):
            yield from measure(name, make, num_steps=6 if quick else 600, block=3 if quick else 100, seed=seed)


class Side:
    """One of the two: a case, and Pyro parameters to itself.

    :param make: makes the case, with the same start each time.
    :param wrap: what becomes of its bound.
    :param seed: of the start and of the fit.
    """

    def __init__(self, make: Callable[[], Case], wrap: Callable[[ELBO], ELBO], seed: int):
        self._store: StateDict = {"params": {}, "constraints": {}}
        with pyro.get_param_store().scope(self._store), seeded(seed):
            self._case = make()
        self._bound, self._seed = wrap(self._case.bound), seed
        self._optim = JointOptim(torch.optim.Adam, {"lr": LEARNING_RATE, "fused": True})
        self.seconds: list[float] = []

    def train(self, num_steps: int) -> None:
        """Take steps, and note the wall seconds of each."""
        with pyro.get_param_store().scope(self._store):
            result = fit(
                self._case.model,
                self._case.guide,
                *self._case.args,
                loss=self._bound,
                optim=self._optim,
                num_steps=num_steps,
                batch_size=self._case.batch_size,
                seed=self._seed + len(self.seconds),
                progress=False,
            )
        self.seconds += np.diff(result.seconds, prepend=0.0).tolist()


def measure(
    name: str, make: Callable[[], Case], *, num_steps: int, block: int, seed: int, backend: str = "inductor"
) -> Iterator[Measurement]:
    """Take steps of both by turns.

    :param name: what is fitted.
    :param make: makes it.
    :param num_steps: steps of each.
    :param block: steps of one before the other has its turn.
    :param seed: of the start and of the fit.
    :param backend: of :class:`~pyro_lvgp.infer.CompiledELBO`.
    """
    plain = Side(make, lambda bound: bound, seed)
    compiled = Side(make, lambda bound: CompiledELBO(bound, backend=backend), seed)
    for done in range(0, num_steps, block):
        for side in (plain, compiled):
            side.train(min(block, num_steps - done))
    slow, fast = (statistics.median(side.seconds) for side in (plain, compiled))
    wait = max(compiled.seconds) - fast
    values = {
        "step [ms]": 1e3 * slow,
        "compiled [ms]": 1e3 * fast,
        "ratio": slow / fast,
        "compile [s]": wait,
        "pays after [steps]": wait / (slow - fast) if fast < slow else math.inf,
    }
    settings: Settings = {"steps": num_steps, "optimiser": f"fused Adam, rate {LEARNING_RATE:g}", "dtype": "float64"}
    for metric, value in values.items():
        yield Measurement("steps", name, metric, value, sum(compiled.seconds), settings)


def gplvm(bound: ELBO, guide: Callable[[BayesianGPLVM], Any] = MeanFieldGuide) -> Case:
    """Oil flow."""
    Y = standardised()
    model = BayesianGPLVM(len(Y), Y.shape[1], 10, num_inducing=30).double().initialize(Y)
    return Case(model, guide(model), bound, (Y,), BATCH_SIZE)


def eeg() -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
    """Times from 0 to 1 and standardised electrodes, with gaps."""
    y, _, _ = gpvae_benchmark.eeg().data
    return torch.linspace(0.0, 1.0, len(y), dtype=y.dtype)[:, None], y


def gpvae() -> Case:
    """EEG."""
    x, y = eeg()
    lengthscale = torch.full((3, 1), 0.05, dtype=torch.float64)
    kernel = RBF(1, lengthscale=lengthscale, batch_shape=(3,))
    model = GPVAE(kernel, MLP(3, y.shape[1], (20,)), num_data=len(x)).double()
    guide = StructuredGPGuide(model, IndexNet(y.shape[1], 3)).double()
    return Case(model, guide, StructuredELBO(), (x, y), 100)


def sparse_gpvae() -> Case:
    """EEG, projected sites, 30 inducing points."""
    x, y = eeg()
    lengthscale = torch.full((3, 1), 0.05, dtype=torch.float64)
    kernel = RBF(1, lengthscale=lengthscale, batch_shape=(3,))
    Z = torch.linspace(0.0, 1.0, 30, dtype=torch.float64)[:, None]
    model = SparseGPVAE(kernel, MLP(3, y.shape[1], (20,)), Z).double()
    guide = SparseStructuredGPGuide(model, IndexNet(y.shape[1], 3)).double()
    return Case(model, guide, StructuredELBO(), (x, y), None)


def users_own() -> Case:
    """Poisson factorisation, in plain Pyro."""
    N, D, Q = 500, 30, 5
    zeros, ones = torch.zeros(Q, dtype=torch.float64), torch.ones(D, dtype=torch.float64)

    def model(y, idx=None):
        W = pyro.sample("W", dist.Normal(zeros[:, None].expand(Q, D), 0.5).to_event(2))
        with pyro.plate("data", N, subsample=idx):
            x = pyro.sample("x", dist.Normal(zeros, 1.0).to_event(1))
            rate = (x.unsqueeze(-2) @ W).squeeze(-2).exp()
            pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    guide = MeanFieldGuide(model, create_plates=lambda y, idx=None: pyro.plate("data", N, subsample=idx))
    return Case(model, guide, MeanFieldELBO(), (torch.poisson(ones.expand(N, D)),), 100)


def annealed(num_steps: int) -> Callable[[BayesianGPLVM], AutoAnnealedLangevin]:
    """Guides of so many transitions."""
    return lambda model: AutoAnnealedLangevin(model, num_steps=num_steps)


CASES: dict[str, Callable[[], Case]] = {
    "Bayesian GPLVM, mean field": lambda: gplvm(MeanFieldELBO()),
    "Bayesian GPLVM, IW, S = 5": lambda: gplvm(ImportanceWeightedELBO(num_samples=5)),
    "Bayesian GPLVM, annealed, K = 5": lambda: gplvm(MeanFieldELBO(num_samples=1), annealed(5)),
    "Bayesian GPLVM, annealed, K = 10": lambda: gplvm(MeanFieldELBO(num_samples=1), annealed(10)),
    "GP-VAE": gpvae,
    "GP-VAE, sparse": sparse_gpvae,
    "a user's own, mean field": users_own,
}
