"""Models of groups: eight schools, groups of different sizes, mixed models of counts, random slopes."""

import numpy as np
from pyroapi import distributions as dist
from pyroapi import ops, pyro

from benchmarks.tasks.any_model.problem import Problem, sigmoid


def eight_schools() -> Problem:
    """Eight schools of Rubin (1981), centred."""

    def model(y, stddev):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, stddev), obs=y)

    y = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    return Problem(model, (y, np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])))


def hierarchical_normal() -> Problem:
    """Normal means of 20 groups of 1 to 300 rows, so that the posteriors of the means are wide and narrow."""

    def model(y, group):
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        tau = pyro.sample("tau", dist.HalfNormal(5.0))
        noise = pyro.sample("noise", dist.HalfNormal(5.0))
        with pyro.plate("groups", 20):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(theta[..., group], noise), obs=y)

    random = np.random.default_rng(6)
    group = np.repeat(np.arange(20), np.geomspace(1, 300, 20).round().astype(int))
    theta = 3.0 + 1.5 * random.standard_normal(20)
    return Problem(model, (theta[group] + 0.8 * random.standard_normal(len(group)), group))


def binomial_glmm() -> Problem:
    """Binomial counts of 303 districts of 5 to 30 000 trials, with a centred effect of each district."""

    def model(X, trials, y):
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([X.shape[1]]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("districts", len(y)):
            effect = pyro.sample("effect", dist.Normal(0.0, sigma))
            pyro.sample("y", dist.Binomial(trials, logits=intercept + (X * beta).sum(-1) + effect), obs=y)

    random = np.random.default_rng(7)
    X = random.standard_normal((303, 5))
    trials = random.lognormal(5.5, 1.5, 303).clip(5, 30_000).round()
    logits = 0.3 + X @ np.array([-0.5, 0.2, 0.1, 0.0, 0.3]) + 0.35 * random.standard_normal(303)
    return Problem(model, (X, trials, random.binomial(trials.astype(int), sigmoid(logits)).astype(float)))


def poisson_exposures() -> Problem:
    """Poisson counts of 100 rows with exposures of 1 to 10⁶, in 10 regions."""

    def model(X, region, exposure, y):
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("regions", 10):
            effect = pyro.sample("effect", dist.Normal(0.0, sigma))
        with pyro.plate("data", len(y)):
            log_rate = intercept + (X * beta).sum(-1) + effect[..., region]
            pyro.sample("y", dist.Poisson(exposure * ops.exp(log_rate)), obs=y)

    random = np.random.default_rng(8)
    X, region = random.standard_normal((100, 2)), np.arange(100) % 10
    exposure = 10.0 ** random.uniform(0.0, 6.0, 100)
    log_rate = -4.0 + X @ np.array([0.4, -0.2]) + (0.5 * random.standard_normal(10))[region]
    return Problem(model, (X, region, exposure, random.poisson(exposure * np.exp(log_rate)).astype(float)))


def random_slopes() -> Problem:
    """Intercepts and slopes of 18 subjects with 10 rows each, and their correlation."""

    def model(t, subject, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(2.0).expand([2]).to_event(1))
        correlation = pyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        noise = pyro.sample("noise", dist.HalfNormal(2.0))
        with pyro.plate("subjects", 18):
            line = pyro.sample("line", dist.MultivariateNormal(mean, scale_tril=scale[..., None] * correlation))
        with pyro.plate("data", len(y)):
            lines = line[..., subject, :]
            pyro.sample("y", dist.Normal(lines[..., 0] + lines[..., 1] * t, noise), obs=y)

    random = np.random.default_rng(9)
    subject, t = np.repeat(np.arange(18), 10), np.tile(np.linspace(0.0, 3.0, 10), 18)
    scale_tril = np.array([[0.5, 0.0], [0.15, 0.3]])
    line = np.array([2.5, 0.5]) + random.standard_normal((18, 2)) @ scale_tril.T
    y = line[subject, 0] + line[subject, 1] * t + 0.3 * random.standard_normal(180)
    return Problem(model, (t, subject, y))
