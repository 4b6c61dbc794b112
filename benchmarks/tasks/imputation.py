"""Imputation of hidden pixels: random-feature LVM, principal components, nearest neighbours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import sklearn
import torch
from jaxtyping import Bool, Float
from pyro.infer import TraceMeanField_ELBO
from sklearn.impute import KNNImputer
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import timed
from benchmarks.core.report import Measurement, Row, Settings
from benchmarks.peers.ppca import PPCA
from benchmarks.tasks import srflvm
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.infer import CompiledELBO, fit
from pyro_lvgp.models import RandomFeatureLVM

NUM_THREADS = 1
RATES, LATENT_DIMS = (0.0, 0.1, 0.3, 0.6), (2, 20)
NUM_STEPS, NUM_COOL_STEPS, NUM_ITERATIONS, NUM_DRAWS = 600, 200, 40, 64
COMPILED_FROM = 300  # steps
QUICK_STEPS, QUICK_ROWS, QUICK_RATES = 2, 100, (0.6,)
HIDDEN, ALL = "MSE of hidden entries", "MSE of all entries"
PUBLISHED: list[Row] = []
NOTES = """\
A share of the entries, drawn anew for each seed, is hidden. Metrics are mean squared errors in (grey level / 255)²: of the
hidden entries, and of all entries compared with the expectations by the model, also of observed entries. If no entry is
hidden, the second error is the reconstruction error. Nearest neighbours return observed entries unchanged, and have no second
error. cifar is that of `srflvm`, 2000 images of 20 x 20 pixels; frey has 1965 faces of 28 x 20. PPCA has as many factors as
the random-feature model has latents. Table V of the SRFLVM paper (cifar 0.022, 0.026, 0.039, 0.048 and Frey 0.004, 0.009,
0.042, 0.152 at 0, 10, 30, 60 %) states neither the entries nor the number of latents. Our model is fitted with weights
"filled", by compiled steps (`CompiledELBO`), and predicts with weights "collapsed"."""


@dataclass(frozen=True)
class Task:
    """Images and their hidden pixels.

    :param truth: pixels from 0 to 1.
    :param hidden: mask of the hidden pixels.
    """

    truth: Float[Tensor, "N D"]
    hidden: Bool[Tensor, "N D"]

    @property
    def Y(self) -> Float[Tensor, "N D"]:
        """Pixels, NaN where hidden."""
        return self.truth.masked_fill(self.hidden, torch.nan)

    def score(self, expected: Float[Tensor, "N D"], *, complete: bool) -> dict[str, float]:
        """Errors of expectations of the pixels.

        :param complete: whether observed pixels have expectations, too.
        """
        squares = (expected - self.truth).square()
        scores = {HIDDEN: squares[self.hidden].mean().item()} if self.hidden.any() else {}
        return scores | ({ALL: squares.mean().item()} if complete else {})


def make_task(truth: Float[np.ndarray, "N D"], rate: float, *, seed: int) -> Task:
    """Hide a part of the entries at random."""
    generator = torch.Generator().manual_seed(seed)
    return Task(torch.as_tensor(truth, dtype=torch.float32), torch.rand(truth.shape, generator=generator) < rate)


def random_features(task: Task, latent_dim: int, *, seed: int, num_steps: int, num_cool_steps: int) -> Float[Tensor, "N D"]:
    """Posterior mean of the functions of our model, whose initial kernel is nearly linear."""
    mean, stddev = task.Y.nanmean(0), task.truth[~task.hidden].std()
    Y = (task.Y - mean) / stddev
    N, D = Y.shape
    model = RandomFeatureLVM(N, D, latent_dim, num_frequencies=50, lengthscale=float(latent_dim), seed=seed).initialize(Y)
    with torch.no_grad():
        # Of a kernel of variance one little more than Q / ℓ² is linear in x.
        model.kernel_variance = model.kernel_variance * latent_dim
    guide = RandomFeatureGuide(model, weights="filled", frequencies="gaussian", init_scale=0.2, seed=seed)
    bound = TraceMeanField_ELBO()
    loss = CompiledELBO(bound) if num_steps >= COMPILED_FROM else bound
    for lr, steps in ((0.02, num_steps), (0.003, num_cool_steps)):
        blocks = guide.blocks(lr=lr)
        fit(model, guide, Y, optim=blocks, loss=loss, num_steps=steps, seed=seed, progress=False)
    guide.weights = "collapsed"
    return mean + stddev * model.reconstruct(guide, Y, num_samples=NUM_DRAWS).mean


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Measure all methods at all rates on both sets, or on one, for each seed; if quick, few steps on some of the rows."""
    for name in [only] if only else list(TASKS):
        truth = TASKS[name]()
        for seed in tqdm(range(seeds), desc=name, unit="seed"):
            for rate in QUICK_RATES if quick else RATES:
                task = make_task(truth[:QUICK_ROWS] if quick else truth, rate, seed=seed)
                steps = (QUICK_STEPS,) * 3 if quick else (NUM_STEPS, NUM_COOL_STEPS, NUM_ITERATIONS)
                yield from measure(f"{name}, {rate:.0%} hidden", task, *steps, seed=seed)


def measure(
    dataset: str, task: Task, num_steps: int, num_cool_steps: int, num_iterations: int, *, seed: int
) -> Iterator[Measurement]:
    """Impute with each method, and score it."""
    for latent_dim in LATENT_DIMS:

        def ours(latent_dim: int = latent_dim) -> Tensor:
            return random_features(task, latent_dim, seed=seed, num_steps=num_steps, num_cool_steps=num_cool_steps)

        def ppca(latent_dim: int = latent_dim) -> Tensor:
            return PPCA(task.Y, latent_dim).fit(num_iterations).reconstruct()

        settings: Settings = {
            "frequencies": 50,
            "weights": "filled, then collapsed",
            "lengthscale at first": "Q",
            "draws": NUM_DRAWS,
        }
        settings |= {"optimiser": "Adam, 0.02 then 0.003, all rows", "steps": f"{num_steps} then {num_cool_steps}"}
        yield from _measured(dataset, f"RandomFeatureLVM, Q = {latent_dim}", ours, task, settings, seed=seed)
        yield from _measured(dataset, f"PPCA, {latent_dim} factors", ppca, task, {"EM iterations": num_iterations}, seed=seed)
    if task.hidden.any():
        yield from _measured(
            dataset, f"KNNImputer, scikit-learn {sklearn.__version__}", lambda: knn(task), task, {"neighbours": 5}, seed=seed
        )


def knn(task: Task) -> Tensor:
    """Imputation by the five nearest neighbours."""
    return torch.as_tensor(KNNImputer(n_neighbors=5).fit_transform(task.Y.numpy()))


def _measured(
    dataset: str, name: str, fill: Callable[[], Tensor], task: Task, settings: Settings, *, seed: int
) -> Iterator[Measurement]:
    expected, seconds = timed(fill, seed=seed)
    for metric, value in task.score(expected, complete=not name.startswith("KNN")).items():
        yield Measurement(dataset, name, metric, value, seconds, settings)


def cifar() -> Float[np.ndarray, "N D"]:
    """Images of five classes of CIFAR-10."""
    return srflvm.cifar().Y / 255.0


def frey() -> Float[np.ndarray, "N D"]:
    """Frey faces."""
    return load_dataset("frey")["X"] / 255.0


TASKS = {"cifar": cifar, "frey": frey}
