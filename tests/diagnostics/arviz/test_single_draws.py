"""Models that do not broadcast over draws."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp.diagnostics import to_arviz


@pytest.mark.parametrize("num_samples", [3, 4])
def test_undeclared_batch_dimension_asks_for_single_draws(num_samples):
    def model(y):  # a batch of three in no plate: with three draws the two would be confused
        mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    def guide(y):
        pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0))

    with pytest.raises(RuntimeError, match="vectorize=False"):
        to_arviz(model, guide, torch.zeros(3), num_samples=num_samples)
    tree = to_arviz(model, guide, torch.zeros(3), num_samples=num_samples, vectorize=False)
    assert tree["posterior"]["mu"].dims == ("chain", "draw", "mu_batch_0")
    mu = torch.tensor(tree["posterior"]["mu"].values)
    np.testing.assert_allclose(tree["log_likelihood"]["y"], dist.Normal(mu, 1.0).log_prob(torch.zeros(())), rtol=1e-5)


def test_model_that_does_not_broadcast_asks_for_single_draws():
    X = torch.randn(5, 2)

    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    y = torch.zeros(5)
    with pytest.raises(RuntimeError, match="vectorize=False"):
        to_arviz(model, AutoNormal(model), y, num_samples=4)
    tree = to_arviz(model, AutoNormal(model), y, num_samples=4, vectorize=False)
    w = torch.tensor(tree["posterior"]["w"].values[0])
    np.testing.assert_allclose(tree["log_likelihood"]["y"][0], dist.Normal(w @ X.T, 1.0).log_prob(y), rtol=1e-4)


class NoDraws(dist.Normal):
    def rsample(self, sample_shape=()):
        raise NotImplementedError("no draws of this")


class FewAtOnce(dist.Normal):
    def log_prob(self, value):
        if self.batch_shape.numel() > 100:
            raise RuntimeError("not enough memory")
        return super().log_prob(value)


@pytest.mark.parametrize(
    ("likelihood", "mean", "error", "message"),
    [
        (NoDraws, 3.0, NotImplementedError, "^no draws of this"),
        (FewAtOnce, 3.0, RuntimeError, "^not enough memory$"),
        (dist.Normal, -3.0, ValueError, r"(?s)^Error while computing log_prob at site 'x'.*to be within the support"),
    ],
    ids=["predictions", "memory", "support"],
)
def test_what_does_not_fail_for_want_of_broadcasting_keeps_its_error(likelihood, mean, error, message):
    def model(y):
        x = pyro.sample("x", dist.Exponential(1.0))
        with pyro.plate("data", 6):
            pyro.sample("y", likelihood(x, 1.0), obs=y)

    def guide(y):
        pyro.sample("x", dist.Normal(mean, 1e-3))

    with pytest.raises(error, match=message) as raised:
        to_arviz(model, guide, torch.zeros(6), num_samples=40)
    assert raised.type is error
    assert "vectorize" not in str(raised.value)


def test_model_that_reduces_over_its_rows_asks_for_single_draws():
    def model(y):
        with pyro.plate("data", 6):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.deterministic("total", x.sum())
        with pyro.plate("obs", 6):
            pyro.sample("y", dist.Normal(x.mean(), 1.0), obs=y)

    y, guide = torch.zeros(6), AutoNormal(model, init_scale=0.8)
    with pytest.raises(RuntimeError, match=r"(?s)does the model reduce over a plate, as x.mean\(\)\?.*vectorize=False"):
        to_arviz(model, guide, y, num_samples=4)
    tree = to_arviz(model, guide, y, num_samples=4, vectorize=False, seed=0)
    np.testing.assert_allclose(tree.posterior["total"], tree.posterior["x"].sum("data"), rtol=1e-5)


def test_model_with_noise_of_its_own_is_none_that_reduces():
    dropout = torch.nn.Dropout(0.5)

    def model(y):
        with pyro.plate("data", 6):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(dropout(3.0 + x), 0.1), obs=y)

    assert to_arviz(model, AutoNormal(model), torch.zeros(6), num_samples=4).posterior["x"].shape == (1, 4, 6)
