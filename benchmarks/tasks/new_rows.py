"""Latents of new rows with half of their entries hidden: methods and priors of `infer_latents`."""

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Float
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Bernoulli, Likelihood, Poisson, StudentT
from pyro_lvgp.models import BayesianGPLVM

NUM_THREADS = 1
LATENT_DIM, NUM_INDUCING, NUM_STEPS, NUM_SAMPLES = 5, 50, 400, 32
PUBLISHED: list[Row] = []
NOTES = f"""\
A Bayesian GPLVM with {LATENT_DIM} latent dimensions and {NUM_INDUCING} inducing points is fitted to some of the rows, with
Adam and a learning rate of 0.05. Half of the entries of the other rows are hidden, and predicted from the inferred latents.
"infer [s/1000 rows]" are the wall seconds of `infer_latents`, for 1000 rows. Means and densities are those of {NUM_SAMPLES}
draws of the inducing outputs; NLPD is in nats per hidden entry. "default" sets nothing: Laplace's approximation for the five
best components of a mixture fitted to the training latents. Splits, hidden entries and fits of one seed are the same for all
settings. Data are those of scikit-learn: digits, standardised, binary (intensities above 7) and as counts, and the
breast-cancer table, standardised."""


class Task(NamedTuple):
    """A table, and the likelihood of its entries; None for Gaussian noise and linear factors, as by default."""

    Y: Float[Tensor, "N D"]
    likelihood: Callable[[], Likelihood] | None
    num_train: int


def digits() -> Float[Tensor, "N D"]:
    """Digits without the pixels at the edge that hardly change."""
    Y = torch.as_tensor(load_digits().data, dtype=torch.float32)
    return Y[:, Y.std(0) > 1.0]


def standardised(Y: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Columns with mean 0 and standard deviation 1."""
    return (Y - Y.mean(0)) / Y.std(0)


def breast_cancer() -> Float[Tensor, "N D"]:
    """Standardised breast-cancer table."""
    return standardised(torch.as_tensor(load_breast_cancer().data, dtype=torch.float32))


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: Task(standardised(digits()), None, 797),
    "binary digits": lambda: Task((digits() > 7.0).float(), Bernoulli, 797),
    "digits as counts": lambda: Task(digits(), Poisson, 797),
    "breast cancer": lambda: Task(breast_cancer(), None, 300),
    "breast cancer, Student's t": lambda: Task(breast_cancer(), StudentT, 300),
}
SETTINGS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether the prior is N(0, I), and arguments
    "variational, N(0, I)": (True, {"method": "variational"}),
    "variational": (False, {"method": "variational"}),
    "Laplace, N(0, I)": (True, {"method": "laplace"}),
    "default": (False, {}),
    "Laplace, all components": (False, {"max_components": 20}),
}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Predict hidden entries of new rows from latents by each setting."""
    num_steps = 10 if quick else NUM_STEPS
    for name, seed in tqdm(list(product([only] if only else TASKS, range(seeds))), desc="new_rows", unit="fit"):
        yield from measure(name, seed=seed, num_steps=num_steps)


def measure(name: str, *, seed: int, num_steps: int) -> Iterator[Measurement]:
    """Fit a model once; infer latents of the other rows by all settings."""
    with isolated(seed):
        Y, make_likelihood, num_train = TASKS[name]()
        Y = Y[torch.randperm(len(Y))]
        train, truth = Y[:num_train], Y[num_train:]
        hidden = torch.rand(truth.shape) < 0.5
        hidden[hidden.all(1), 0] = False
        rows = truth.masked_fill(hidden, torch.nan)
        model, guide, seconds = fitted(train, make_likelihood, num_steps=num_steps, seed=seed)
        settings: Settings = {"rows": len(train), "new rows": len(rows), "columns": Y.shape[1], "steps": num_steps}
        for setting, (is_standard, options) in SETTINGS.items():
            prior = dist.Normal(torch.zeros(LATENT_DIM), 1.0).to_event(1) if is_standard else None
            start = time.perf_counter()
            latents = model.infer_latents(guide, rows, prior=prior, seed=seed, **options)
            per_row = (time.perf_counter() - start) / len(rows)
            scores = {"infer [s/1000 rows]": 1000.0 * per_row, **prediction_scores(model, guide, rows, latents, truth, hidden)}
            for metric, value in scores.items():
                yield Measurement(name, setting, metric, value, seconds, settings)


def fitted(
    train: Tensor, make_likelihood: Callable[[], Likelihood] | None, *, num_steps: int, seed: int
) -> tuple[BayesianGPLVM, MeanFieldGuide, float]:
    """Fit a model; return it with its guide and the wall seconds."""
    if make_likelihood is None:
        model = BayesianGPLVM.from_data(train, LATENT_DIM, num_inducing=NUM_INDUCING, seed=seed)
    else:
        sizes: dict[str, Any] = {"num_inducing": NUM_INDUCING, "likelihood": make_likelihood()}
        num_data, data_dim = train.shape
        model = BayesianGPLVM(num_data, data_dim, LATENT_DIM, **sizes).initialize(train, seed=seed)
    guide = MeanFieldGuide(model)
    loss, optim = MeanFieldELBO(max_plate_nesting=1), JointAdam(lr=0.05)
    history = fit(model, guide, train, loss=loss, optim=optim, num_steps=num_steps, seed=seed, progress=False)
    return model, guide, history.seconds[-1]


def prediction_scores(
    model: BayesianGPLVM, guide: MeanFieldGuide, rows: Tensor, latents: Any, truth: Tensor, hidden: Tensor
) -> dict[str, float]:
    """Scores of the hidden entries."""
    filled = model.impute(guide, rows, latents=latents, num_samples=NUM_SAMPLES)
    low, high = filled.quantile([0.05, 0.95])
    is_covered = (low <= truth) & (truth <= high)
    log_prob = filled.log_prob(torch.where(hidden, truth, rows))[hidden]
    return {
        "RMSE": (filled.mean - truth)[hidden].square().mean().sqrt().item(),
        "NLPD": -log_prob.mean().item(),
        "coverage 90%": is_covered[hidden].double().mean().item(),
    }
