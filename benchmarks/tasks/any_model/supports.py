"""Models whose difficulty is the support or the shape of the posterior: bounds, a simplex, Neal's funnel."""

import numpy as np
from pyroapi import distributions as dist
from pyroapi import ops, pyro

from benchmarks.tasks.any_model.problem import Problem, sigmoid


def psychometric() -> Problem:
    """Psychometric function of 9 levels with 40 trials each, whose asymptotes have bounded supports."""

    def model(level, trials, y):
        guess = pyro.sample("guess", dist.Uniform(0.0, 0.5))
        lapse = pyro.sample("lapse", dist.Beta(1.0, 10.0))
        threshold = pyro.sample("threshold", dist.Uniform(-4.0, 4.0))
        slope = pyro.sample("slope", dist.LogNormal(0.0, 1.0))
        with pyro.plate("levels", len(y)):
            success = 1.0 / (1.0 + ops.exp(-slope * (level - threshold)))
            pyro.sample("y", dist.Binomial(trials, probs=guess + (1.0 - lapse) * (1.0 - guess) * success), obs=y)

    random = np.random.default_rng(13)
    level, trials = np.linspace(-3.0, 3.0, 9), np.full(9, 40.0)
    probs = 0.25 + 0.97 * 0.75 * sigmoid(2.0 * (level - 0.3))
    return Problem(model, (level, trials, random.binomial(40, probs).astype(float)))


def mixture_weights() -> Problem:
    """Weights of a mixture of five known normals, for 200 rows; two of the components overlap."""
    locs = np.array([-4.0, -1.0, 0.0, 2.0, 5.0])

    def model(y, locs):
        weights = pyro.sample("weights", dist.Dirichlet(ops.ones_like(locs)))
        with pyro.plate("data", len(y)):
            # One normal for each entry of the weights, also where these have dimensions of draws.
            normals = dist.Normal(locs + ops.zeros_like(weights), 1.0)
            pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), normals), obs=y)

    random = np.random.default_rng(14)
    component = random.choice(5, 200, p=[0.3, 0.25, 0.25, 0.15, 0.05])
    return Problem(model, (locs[component] + random.standard_normal(200), locs))


def funnel() -> Problem:
    """Neal's (2003) funnel of 10 dimensions, without data: its evidence is 1."""

    def model():
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        with pyro.plate("entries", 9):
            pyro.sample("x", dist.Normal(0.0, ops.exp(v / 2)))

    return Problem(model)
