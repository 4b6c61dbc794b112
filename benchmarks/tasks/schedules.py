"""Learning-rate schedules at equal steps: bound after a fit with a constant rate, and with rates that fall along a cosine."""

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.infer import TraceMeanField_ELBO
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row
from pyro_lvgp.datasets import load_dataset
from pyro_lvgp.guides import MeanFieldGuide, RandomFeatureGuide, StructuredGPGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE, BayesianGPLVM, RandomFeatureLVM
from pyro_lvgp.networks import IndexNet

NUM_THREADS = 1
NUM_STEPS, NUM_DRAWS = 1000, 100
PUBLISHED: list[Row] = []
NOTES = f"""\
Each row is a fit of {NUM_STEPS} steps from the initial values of the library, with Adam. "constant" has a learning rate of
0.01, the default of `fit`. "cosine" and "cosine from 0.02" have rates that fall along a cosine to zero at the last step,
`LRSchedule("cosine")`, from 0.01 and from 0.02. Rates of random features, with one gradient step for each closed form, are
twice as large, as by default. "bound" is evaluated after the fit on all data, and averaged over {NUM_DRAWS} draws. "gain"
is the rise of the bound over the last {NUM_STEPS // 10} steps, `history.gain`, and "z" the gain divided by its standard error.
Fits of one seed have the same initial values and draws."""

SCHEDULES: dict[str, tuple[float, bool]] = {
    "constant": (1.0, False),
    "cosine": (1.0, True),
    "cosine from 0.02": (2.0, True),
}


class Setup(NamedTuple):
    """Model and guide, the data, and the settings of a fit.

    :param bound: bound to evaluate after the fit.
    :param options: arguments of ``fit``.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    data: tuple[Tensor, ...]
    bound: Any
    options: dict[str, Any]


def run(*, quick: bool, seeds: int) -> Iterator[Measurement]:
    """Fit every set with every schedule."""
    num_steps = 20 if quick else NUM_STEPS
    for name, seed, schedule in tqdm(list(product(TASKS, range(seeds), SCHEDULES)), desc="schedules", unit="fit"):
        start = time.perf_counter()
        scores = measure(name, schedule, seed=seed, num_steps=num_steps)
        seconds = time.perf_counter() - start
        for metric, value in scores.items():
            yield Measurement(name, schedule, metric, value, seconds, {"steps": num_steps})


def measure(name: str, schedule: str, *, seed: int, num_steps: int) -> dict[str, float]:
    """Fit once; return bound and gain in nats per observed entry."""
    factor, falls = SCHEDULES[schedule]
    with isolated(seed):
        model, guide, data, bound, options = TASKS[name](factor)
        callbacks = [LRSchedule("cosine")] if falls else []
        history = fit(model, guide, *data, num_steps=num_steps, seed=seed, progress=False, callbacks=callbacks, **options)
        after = sum(bound.loss(model, guide, *data) for _ in range(NUM_DRAWS)) / NUM_DRAWS
    scores = {"bound [nats/entry]": -after / history.num_entries}
    if (gain := history.gain) is not None:
        scores |= {"gain [nats/entry]": gain.value, "z": gain.value / gain.standard_error}
    return scores


def digits(num_rows: int) -> Float[Tensor, "N 64"]:
    """Rows of scikit-learn's digits, with intensities from 0 to 1."""
    return torch.as_tensor(load_digits().data[:num_rows] / 16, dtype=torch.float32)


def oilflow() -> Float[Tensor, "100 12"]:
    """Standardised rows of oil flow, evenly spaced."""
    Y = torch.as_tensor(load_dataset("oilflow")["X"], dtype=torch.float32)[::10]
    return (Y - Y.mean(0)) / Y.std(0)


def gplvm(Y: Tensor, factor: float, **options: Any) -> Setup:
    """Bayesian GPLVM with a mean-field guide."""
    N, D = Y.shape
    model = BayesianGPLVM(N, D, 5, num_inducing=20).initialize(Y)
    bound = MeanFieldELBO(max_plate_nesting=1)
    return Setup(model, MeanFieldGuide(model), (Y,), bound, {"loss": bound, "optim": adam(factor)} | options)


def eeg(factor: float) -> Setup:
    """GP-VAE of every second sample of seven electrodes, some of them hidden."""
    data = load_dataset("eeg")
    t, Y = torch.as_tensor(data["t"])[::2, None], torch.as_tensor(data["Y"]).clone()
    Y[torch.as_tensor(data["test_mask"])] = torch.nan
    Y = Y[::2]
    Y = (Y - Y.nanmean(0)) / (Y - Y.nanmean(0)).square().nanmean(0).sqrt()
    kernel = RBF(1, lengthscale=0.1, batch_shape=(2,)).to(Y.dtype)
    model = GPVAE(kernel, nn.Linear(2, 7), Gaussian(data_dim=7)).to(Y.dtype)
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(7, 2).to(Y.dtype)})
    bound = StructuredELBO()
    return Setup(model, guide, (t, Y), bound, {"loss": bound, "optim": adam(factor)})


def regression(factor: float) -> Setup:
    """Linear regression of diabetes progression, with unknown noise, in Pyro."""
    X, y = (torch.as_tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()

    def model(y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(X)):
            pyro.sample("y", dist.Normal((X * beta[..., None, :]).sum(-1), noise[..., None]), obs=y)

    bound = MeanFieldELBO(max_plate_nesting=1)
    return Setup(model, MeanFieldGuide(model), (y,), bound, {"loss": bound, "optim": adam(factor)})


def random_features(factor: float) -> Setup:
    """Random-feature LVM of digits, fitted block by block."""
    Y = digits(100)
    model = RandomFeatureLVM(100, 64, 2, num_frequencies=20, num_components=5).initialize(Y)
    guide = RandomFeatureGuide(model)
    return Setup(model, guide, (Y,), TraceMeanField_ELBO(), {"optim": guide.blocks(lr=0.02 * factor, num_steps=1)})


def adam(factor: float) -> JointAdam:
    """The default optimiser, with a multiple of its learning rate."""
    return JointAdam(lr=0.01 * factor)


TASKS: dict[str, Callable[[float], Setup]] = {
    "digits, mean field": lambda factor: gplvm(digits(150), factor),
    "digits, mini-batches": lambda factor: gplvm(digits(150), factor, batch_size=50),
    "oil flow, mean field": lambda factor: gplvm(oilflow(), factor),
    "eeg, GP-VAE": eeg,
    "diabetes, regression": regression,
    "digits, random features": random_features,
}
