"""Regressions: linear, logistic, robust, ordinal, and with the horseshoe prior."""

import numpy as np
from pyroapi import distributions as dist
from pyroapi import pyro
from sklearn.datasets import load_diabetes

from benchmarks.tasks.any_model.problem import Problem, sigmoid

_LATENT_CUTPOINTS = np.array([-2.0, -0.5, 0.5, 3.0])


def linear_regression() -> Problem:
    """Linear regression of 500 rows on 8 columns, with two global sites."""

    def model(X, y):
        beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([X.shape[1]]).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(5.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((X * beta).sum(-1), noise), obs=y)

    return Problem(model, _linear_data(num_data=500, num_columns=8, noise=0.5, seed=1))


def matrix_regression() -> Problem:
    """Linear regression written as ``X @ beta``, which does not broadcast over draws."""

    def model(X, y):
        beta = pyro.sample("beta", dist.Normal(0.0, 5.0).expand([X.shape[1]]).to_event(1))
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(X @ beta, noise), obs=y)

    return Problem(model, _linear_data(num_data=200, num_columns=4, noise=1.0, seed=2), vectorize=False)


def logistic_regression() -> Problem:
    """Logistic regression of 3000 rows on 6 columns, two of them correlated."""

    def model(X, y):
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 2.5).expand([X.shape[1]]).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=intercept + (X * beta).sum(-1)), obs=y)

    random = np.random.default_rng(3)
    X = random.standard_normal((3000, 6))
    X[:, 1] = 0.9 * X[:, 0] + 0.4 * X[:, 1]
    logits = -1.0 + X @ np.array([1.0, -0.5, 0.8, 0.0, 0.2, -1.5])
    return Problem(model, (X, random.binomial(1, sigmoid(logits)).astype(float)))


def student_t_regression() -> Problem:
    """Robust regression of the diabetes data, whose degrees of freedom are learned."""

    def model(X, y):
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        df = pyro.sample("df", dist.Gamma(2.0, 0.1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.StudentT(df, (X * beta).sum(-1), scale), obs=y)

    X, y = load_diabetes(return_X_y=True)
    return Problem(model, ((X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()))


def horseshoe() -> Problem:
    """Regression of 100 rows on 20 columns, four of them relevant, with the horseshoe prior, not centred."""

    def model(X, y):
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        tau = pyro.sample("tau", dist.HalfCauchy(0.2))
        local = pyro.sample("local", dist.HalfCauchy(1.0).expand([X.shape[1]]).to_event(1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        beta = z * local * tau[..., None]
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal((X * beta).sum(-1), noise), obs=y)

    random = np.random.default_rng(4)
    X = random.standard_normal((100, 20))
    beta = np.concatenate([[2.0, -1.5, 1.0, 0.5], np.zeros(16)])
    return Problem(model, (X, X @ beta + random.standard_normal(100)))


def ordinal_regression() -> Problem:
    """Ordered logistic regression of 400 rows with five levels, and ordered cut points."""

    def model(X, y):
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
        free = dist.Normal(0.0, 3.0).expand([len(_LATENT_CUTPOINTS)]).to_event(1)
        cutpoints = pyro.sample("cutpoints", dist.TransformedDistribution(free, dist.transforms.OrderedTransform()))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.OrderedLogistic((X * beta).sum(-1), cutpoints), obs=y)

    random = np.random.default_rng(5)
    X = random.standard_normal((400, 3))
    utility = X @ np.array([1.5, -1.0, 0.3]) + random.logistic(size=400)
    return Problem(model, (X, (utility[:, None] > _LATENT_CUTPOINTS).sum(1)))


def _linear_data(*, num_data: int, num_columns: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    X, beta = random.standard_normal((num_data, num_columns)), 2.0 * random.standard_normal(num_columns)
    return X, X @ beta + noise * random.standard_normal(num_data)
