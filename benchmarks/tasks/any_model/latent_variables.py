"""Models of latent variables and latent functions: factor analysis, item response, Gaussian processes."""

import numpy as np
import torch
from pyroapi import distributions as dist
from pyroapi import ops, pyro
from sklearn.datasets import load_digits

from benchmarks.tasks.any_model.problem import Problem, sigmoid
from pyro_lvgp.models import BayesianGPLVM


def factor_analysis() -> Problem:
    """Two factors of 100 rows of six columns; the upper triangle of the loadings is zero, their diagonal positive."""
    num_columns, num_factors = 6, 2
    diagonal = np.eye(num_columns, num_factors, dtype=bool)
    lower = np.tril(np.ones((num_columns, num_factors), dtype=bool), -1)
    # One row for each site entry, with a one at its place among the flattened loadings.
    places = np.eye(num_columns * num_factors)

    def model(Y, diagonal_places, lower_places):
        diagonal = pyro.sample("diagonal", dist.HalfNormal(1.0).expand([len(diagonal_places)]).to_event(1))
        lower = pyro.sample("lower", dist.Normal(0.0, 1.0).expand([len(lower_places)]).to_event(1))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0).expand([num_columns]).to_event(1))
        entries = diagonal @ diagonal_places + lower @ lower_places
        loadings = entries.reshape((*entries.shape[:-1], num_columns, num_factors))
        with pyro.plate("data", len(Y)):
            x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([num_factors]).to_event(1))
            pyro.sample("y", dist.Normal((x[..., None, :] * loadings).sum(-1), noise).to_event(1), obs=Y)

    random = np.random.default_rng(10)
    loadings = np.array([[1.5, 0.0], [0.5, 1.5], [1.0, -0.8], [-0.7, 0.9], [0.3, 1.1], [0.9, 0.2]])
    Y = random.standard_normal((100, num_factors)) @ loadings.T + 0.4 * random.standard_normal((100, num_columns))
    return Problem(model, (Y, places[diagonal.ravel()], places[lower.ravel()]))


def item_response() -> Problem:
    """Two-parameter logistic model of the answers of 100 persons to 12 items."""

    def model(Y):
        discrimination = pyro.sample("discrimination", dist.LogNormal(0.0, 0.5).expand([Y.shape[1]]).to_event(1))
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.5).expand([Y.shape[1]]).to_event(1))
        with pyro.plate("persons", len(Y)):
            ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
            logits = discrimination * (ability[..., None] - difficulty)
            pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=Y)

    random = np.random.default_rng(11)
    ability, difficulty = random.standard_normal(100), np.linspace(-2.0, 2.0, 12)
    logits = random.lognormal(0.0, 0.4, 12) * (ability[:, None] - difficulty)
    return Problem(model, (random.binomial(1, sigmoid(logits)).astype(float),))


def gaussian_process() -> Problem:
    """Gaussian process regression of 60 points with priors on its hyperparameters."""

    def model(x, y):
        lengthscale = pyro.sample("lengthscale", dist.InverseGamma(3.0, 3.0))
        amplitude = pyro.sample("amplitude", dist.HalfNormal(2.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        scaled = (x[:, None] - x) / lengthscale[..., None, None]
        covariance = (amplitude**2)[..., None, None] * ops.exp(-0.5 * scaled**2)
        diagonal = (noise**2 + 1e-6)[..., None, None] * ops.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(ops.zeros_like(x), covariance_matrix=covariance + diagonal), obs=y)

    random = np.random.default_rng(12)
    x = np.sort(random.uniform(0.0, 6.0, 60))
    return Problem(model, (x, np.sin(2.0 * x) + 0.3 * x + 0.2 * random.standard_normal(60)))


def gplvm() -> Problem:
    """Two latent dimensions of 100 of scikit-learn's digits; a PyTorch module, which NumPyro cannot run."""
    return _gplvm_of_digits(100, num_inducing=20)


def large_gplvm() -> Problem:
    """Two latent dimensions of 1000 of scikit-learn's digits."""
    return _gplvm_of_digits(1000, num_inducing=50)


def _gplvm_of_digits(num_rows: int, *, num_inducing: int) -> Problem:
    digits = load_digits().data[:num_rows] / 16.0
    Y = (digits - digits.mean()) / digits.std()
    model = (
        BayesianGPLVM(num_rows, Y.shape[1], latent_dim=2, num_inducing=num_inducing)
        .double()
        .initialize(torch.as_tensor(Y), seed=0)
    )
    return Problem(model, (Y,), runs_in_numpyro=False)
