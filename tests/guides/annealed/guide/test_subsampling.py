"""Global and local sites under subsampled plates."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.importance import vectorized_importance_weights

from pyro_lvgp.guides import AutoAnnealedLangevin
from tests.guides.annealed.guide._models import regression, standard_error

pytestmark = pytest.mark.usefixtures("float64")


def test_globals_are_not_annealed_under_subsampling():
    y, idx = torch.randn(10), torch.tensor([1, 2])
    guide = AutoAnnealedLangevin(regression, num_steps=2)
    assert guide(y)["slope"].shape == ()
    with pytest.raises(ValueError, match=r"plate 'data', which (.|\n)*is subsampled(.|\n)*local_plate=(.|\n)*surrogate_model"):
        guide(y[idx], idx)


def test_globals_are_not_annealed_while_a_sequential_plate_is_subsampled():
    def model(y, idx=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", 5, subsample=idx):
            pyro.sample(f"y_{i}", dist.Normal(slope, 1.0), obs=y[i])

    y, guide = torch.randn(5), AutoAnnealedLangevin(model, num_steps=2)
    assert guide(y)["slope"].shape == ()
    with pytest.raises(ValueError, match=r"plate 'data', which (.|\n)*is subsampled"):
        guide(y, torch.tensor([1, 2]))


def test_locals_are_not_annealed_while_a_plate_in_their_score_is_subsampled():
    def model(y, columns=None):
        with pyro.plate("data", 4, dim=-1):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            with pyro.plate("columns", 10, subsample=columns, dim=-2):
                pyro.sample("y", dist.Normal(x, 1.0), obs=y if columns is None else y[columns])

    y = torch.randn(10, 4)
    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    assert guide(y)["x"].shape == (4,)
    with pytest.raises(ValueError, match="plate 'columns', which their score sums over, is subsampled"):
        guide(y, torch.tensor([1, 2]))


@pytest.mark.parametrize("vectorize", [True, False])
def test_all_draws_are_of_the_same_rows(vectorize):
    def model(y):
        with pyro.plate("data", 50, subsample_size=5) as idx:
            x = pyro.sample("x", dist.Normal(y[idx], 0.1))
            pyro.sample("y", dist.Normal(x, 0.1), obs=y[idx])

    y = 10.0 * torch.arange(50.0)
    guide = AutoAnnealedLangevin(model, local_plate="data", num_steps=2)
    guide(y)
    draws = guide.sample_posterior(6, y, chunk_size=2, vectorize=vectorize)["x"]
    assert draws.shape == (6, 5)
    assert (draws.std(0) < 1.0).all()
    low, high = guide.quantiles([0.25, 0.75], y, num_samples=200)["x"]  # in chunks of 100
    assert (high - low < 1.0).all()


def test_a_surrogate_makes_annealed_globals_right_under_subsampling():
    y = torch.randn(10) + 1.0

    def surrogate(batch, idx=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        weight = pyro.param("weight", torch.tensor(2.0), constraint=dist.constraints.positive)
        with pyro.plate("few", 3), poutine.scale(scale=weight):
            pyro.sample("y", dist.Normal(slope, 1.0), obs=y[:3])

    guide = AutoAnnealedLangevin(regression, num_steps=3, surrogate_model=surrogate)
    loss = Trace_ELBO(max_plate_nesting=1)
    guide(y)
    full = -vectorized_importance_weights(regression, guide, y, num_samples=1000, max_plate_nesting=1)[0].detach()
    batches = [torch.randperm(10)[:4] for _ in range(400)]
    sub = torch.tensor([loss.loss(regression, guide, y[idx], idx) for idx in batches])
    assert abs(full.mean() - sub.mean()) < 3.0 * torch.hypot(standard_error(full), standard_error(sub))
    loss.differentiable_loss(regression, guide, y[:4], torch.arange(4)).backward()
    assert pyro.get_param_store()._params["weight"].grad.abs() > 0
