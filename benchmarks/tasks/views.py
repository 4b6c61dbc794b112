"""Several views of the same rows: shared and private dimensions, and targets as views beside regressions."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_wine
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from torch import Tensor
from torch.nn.functional import one_hot
from tqdm import tqdm

from benchmarks.core.isolated import isolated
from benchmarks.core.report import Measurement, Row, Settings
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import JointAdam, LRSchedule, MeanFieldELBO, fit
from pyro_lvgp.likelihoods import Bernoulli, Likelihood
from pyro_lvgp.models import MultiViewGPLVM

NUM_THREADS = 1
NUM_ROWS, NUM_COLUMNS, NUM_STEPS = 300, 8, 1500
LEVEL = 0.9
PUBLISHED: list[Row] = []
NOTES = f"""\
Models of two views are fitted by a mean-field guide with Adam and a learning rate of 0.03 that falls to zero, with the
defaults of MultiViewGPLVM.from_data, and predict a view of the rows of a test set, 30 % of the rows, from the other one.
"simulated": {NUM_ROWS} rows, two views of {NUM_COLUMNS} columns that are smooth random functions of one shared and one
private latent each, with noise of standard deviation 0.2; the model has three dimensions. "recovered" is the share of seeds
in which dimensions() has one dimension for both views, one for the first and one for the second. RMSE, NLPD and coverage of
90 % intervals are those of the second view given the first, of which the private part cannot be predicted.
"diabetes": the ten standardised inputs and the standardised target of scikit-learn's set. "wine": its 13 standardised
inputs, and the class as a view of three binary columns, whose probabilities are divided by their sum.
Peers are fitted to the same training rows by scikit-learn: ridge regression with a penalty chosen by cross-validation, five
nearest neighbours, a Gaussian process with a lengthscale for each input; logistic regression with a penalty chosen by
cross-validation. Ridge and neighbours have Gaussian predictive densities with the variance of five-fold cross-validation.
NLPD is in nats per entry; probabilities of classes are at least 0.001."""


class Split(NamedTuple):
    """Training rows and test rows of inputs and targets."""

    x: Float[Tensor, "N P"]
    y: Float[Tensor, "N D"]
    x_test: Float[Tensor, "T P"]
    y_test: Float[Tensor, "T D"]


def split(x: Tensor, y: Tensor, seed: int) -> Split:
    """Split rows at random, and standardise by the training rows."""
    train, test = train_test_split(np.arange(len(x)), test_size=0.3, random_state=seed)
    x = (x - x[train].mean(0)) / x[train].std(0)
    return Split(x[train], y[train], x[test], y[test])


def smooth_functions(x: Float[Tensor, "N Q"], lengthscale: float = 1.5) -> Float[Tensor, "N D"]:
    """Draw functions of unit variance from a process with a squared exponential kernel, by random features."""
    omega = torch.randn(200, x.shape[-1]) / lengthscale
    phase = 2.0 * torch.pi * torch.rand(200)
    return (x @ omega.mT + phase).cos() @ torch.randn(200, NUM_COLUMNS) * (2.0 / 200) ** 0.5


def regression_scores(mean: Tensor, nlpd: Tensor, lower: Tensor, upper: Tensor, y: Tensor) -> dict[str, float]:
    """Compute scores of predictions with intervals."""
    return {
        "RMSE": float((mean - y).square().mean().sqrt()),
        "NLPD": float(nlpd.mean()),
        "coverage of 90 %": float(((y >= lower) & (y <= upper)).double().mean()),
    }


def gaussian_scores(mean: Tensor, stddev: Tensor, y: Tensor) -> dict[str, float]:
    """Compute scores of Gaussian predictions."""
    normal = torch.distributions.Normal(mean, stddev)
    lower, upper = (normal.icdf(torch.tensor(p, dtype=mean.dtype)) for p in (0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0))
    return regression_scores(mean, -normal.log_prob(y), lower, upper, y)


def class_scores(probability: Float[Tensor, "T C"], labels: Int[Tensor, " T"]) -> dict[str, float]:
    """Compute accuracy and NLPD of classes."""
    chosen = probability.gather(1, labels[:, None]).clamp_min(1e-3)
    return {"accuracy": float((probability.argmax(1) == labels).double().mean()), "NLPD": float(-chosen.log().mean())}


def fitted(
    rows: Split, latent_dim: int | None, likelihood: dict[str, Likelihood], *, num_steps: int, seed: int
) -> tuple[MultiViewGPLVM, MeanFieldGuide]:
    """Fit a model of inputs and targets."""
    views = {"inputs": rows.x, "target": rows.y}
    model = MultiViewGPLVM.from_data(views, latent_dim, likelihood=likelihood, seed=seed)
    guide = MeanFieldGuide(model)
    options: dict[str, Any] = {"progress": False, "seed": seed, "callbacks": [LRSchedule("cosine")]}
    loss, optim = MeanFieldELBO(max_plate_nesting=1), JointAdam(lr=0.03)
    fit(model, guide, model.table(views), loss=loss, optim=optim, num_steps=num_steps, **options)
    return model, guide


def regression(rows: Split, latent_dim: int | None, *, num_steps: int, seed: int) -> tuple[MultiViewGPLVM, dict[str, float]]:
    """Fit a model with a real-valued target, and score its predictions."""
    model, guide = fitted(rows, latent_dim, {}, num_steps=num_steps, seed=seed)
    predicted = model.predict_view(guide, "target", {"inputs": rows.x_test}, num_samples=128, seed=seed)
    lower, upper = predicted.quantile([0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0])
    return model, regression_scores(predicted.mean, -predicted.log_prob(rows.y_test), lower, upper, rows.y_test)


def regression_peers(rows: Split) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Functions that fit a peer and score its predictions, by name."""
    x, y, x_test = rows.x.numpy(), rows.y.numpy(), rows.x_test.numpy()

    def with_constant_noise(estimator: Any) -> dict[str, float]:
        residual = y - cross_val_predict(clone(estimator), x, y, cv=5).reshape(y.shape)
        mean = torch.as_tensor(estimator.fit(x, y).predict(x_test)).reshape(rows.y_test.shape)
        return gaussian_scores(mean.to(rows.y), torch.as_tensor(residual.std(0)).to(rows.y), rows.y_test)

    def process() -> dict[str, float]:
        kernel = ConstantKernel() * SklearnRBF(np.full(x.shape[1], x.shape[1] ** 0.5), (0.1, 1e4)) + WhiteKernel(0.5)
        columns = []
        for column in y.T:
            regressor = GaussianProcessRegressor(kernel, random_state=0).fit(x, column)
            columns.append(regressor.predict(x_test, return_std=True))
        mean, stddev = (torch.as_tensor(np.stack(part, -1)).to(rows.y) for part in zip(*columns, strict=True))
        return gaussian_scores(mean, stddev, rows.y_test)

    yield "ridge (scikit-learn)", lambda: with_constant_noise(RidgeCV(np.logspace(-3, 4, 15)))
    yield "5-NN (scikit-learn)", lambda: with_constant_noise(KNeighborsRegressor(5))
    yield "GP regression (scikit-learn)", process


Scored = Iterator[tuple[str, Callable[[], dict[str, float]]]]


def simulated(*, num_steps: int, seed: int) -> Scored:
    """Two views with one shared and one private latent each."""
    Z = torch.randn(NUM_ROWS, 3)
    first, second = (smooth_functions(Z[:, [0, q]]) for q in (1, 2))
    first, second = (f + 0.2 * torch.randn_like(f) for f in (first, second))
    rows = split(first, second, seed)

    def ours() -> dict[str, float]:
        model, scores = regression(rows, 3, num_steps=num_steps, seed=seed)
        found = sorted(model.dimensions().values())
        return {"recovered": float(found == [("inputs",), ("inputs", "target"), ("target",)]), **scores}

    yield "two views", ours
    yield from regression_peers(rows)


def diabetes(*, num_steps: int, seed: int) -> Scored:
    """Progression of diabetes from ten inputs."""
    x, y = (torch.as_tensor(a).float() for a in load_diabetes(return_X_y=True))
    y = ((y - y.mean()) / y.std())[:, None]
    rows = split(x, y, seed)
    yield "two views", lambda: regression(rows, None, num_steps=num_steps, seed=seed)[1]
    yield from regression_peers(rows)


def wine(*, num_steps: int, seed: int) -> Scored:
    """Cultivar of wines from 13 inputs."""
    x, labels = (torch.as_tensor(a) for a in load_wine(return_X_y=True))
    rows = split(x.float(), one_hot(labels).float(), seed)
    y, y_test = rows.y.argmax(1), rows.y_test.argmax(1)

    def ours() -> dict[str, float]:
        model, guide = fitted(rows, None, {"target": Bernoulli()}, num_steps=num_steps, seed=seed)
        mean = model.predict_view(guide, "target", {"inputs": rows.x_test}, num_samples=128, seed=seed).mean
        return class_scores(mean / mean.sum(1, keepdim=True), y_test)

    def peer(estimator: Any) -> dict[str, float]:
        probability = estimator.fit(rows.x.numpy(), y.numpy()).predict_proba(rows.x_test.numpy())
        return class_scores(torch.as_tensor(probability), y_test)

    penalised = GridSearchCV(LogisticRegression(max_iter=1000), {"C": np.logspace(-3, 3, 13)}, scoring="neg_log_loss")
    yield "two views", ours
    yield "logistic regression (scikit-learn)", lambda: peer(penalised)
    yield "5-NN (scikit-learn)", lambda: peer(KNeighborsClassifier(5))


TASKS: dict[str, Callable[..., Scored]] = {"simulated": simulated, "diabetes": diabetes, "wine": wine}


def run(*, quick: bool, seeds: int, only: str | None = None) -> Iterator[Measurement]:
    """Fit models of two views, and regressions, to each data set."""
    num_steps = 10 if quick else NUM_STEPS
    for name, seed in tqdm(list(product([only] if only else TASKS, range(seeds))), desc="views", unit="fit"):
        yield from measure(name, seed=seed, num_steps=num_steps)


def measure(name: str, *, seed: int, num_steps: int) -> Iterator[Measurement]:
    """Fit each method to one data set, and score its predictions of the test rows."""
    with isolated(seed):
        for method, scores in TASKS[name](num_steps=num_steps, seed=seed):
            start = time.perf_counter()
            values = scores()
            seconds = time.perf_counter() - start
            settings: Settings = {"inputs": "standardised"} | ({"steps": num_steps} if method == "two views" else {})
            for metric, value in values.items():
                assert math.isfinite(value), f"{name}, {method}: {metric} is {value}"
                yield Measurement(name, method, metric, value, seconds, settings)
