"""Mini-batches of every guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from tests.guides.conformance._guides import (
    GUIDES,
    MODELS,
    Problem,
    agree,
    draw,
    estimate,
    latent_sites,
    loss_at,
    moved,
    pairs_where,
    start,
    tensors,
    vectorised,
)

WITHOUT_MINI_BATCHES = {"global", "gp", "sparse-gp"}


@pairs_where(lambda entry, model: entry.mini_batches and model not in WITHOUT_MINI_BATCHES)
def test_mini_batches_average_to_the_full_bound(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    batches = [problem.batch(idx) for idx in torch.randperm(6).split(3)]
    for args in batches:
        trace = poutine.trace(guide).get_trace(*args)
        replayed = poutine.trace(poutine.replay(problem.model, trace)).get_trace(*args)
        for name in latent_sites(problem):
            assert trace.nodes[name]["scale"] == replayed.nodes[name]["scale"] == (2.0 if name in problem.locals else 1.0)
    elbo = vectorised(problem)
    whole, *parts = (estimate(lambda a=args: elbo.loss(problem.model, guide, *a), 12) for args in (problem.args, *batches))
    assert agree(whole, (sum(part[0] for part in parts) / 2, sum(part[1] for part in parts) / 4)), (whole, parts)


@pairs_where(lambda entry, model: entry.mini_batches and not entry.needs_all_data and model not in WITHOUT_MINI_BATCHES)
def test_mini_batch_is_drawn_as_if_it_were_all_data(guide_id, model_id):
    with pyro.settings.context(module_local_params=True):
        problem, guide = start(guide_id, model_id)
        moved(problem, guide)
        args = problem.batch(torch.arange(3))
        small = MODELS[model_id](torch.float32, num_data=3)
        other = GUIDES[guide_id].make(small)
        other(*args[:-1])
        for theirs, ours in ((problem.model, small.model), (guide, other)):
            if isinstance(ours, nn.Module):
                rows = {name: tuple(map(slice, value.shape)) for name, value in tensors(ours).items()}
                ours.load_state_dict({name: value[rows[name]] for name, value in tensors(theirs).items()}, strict=False)
        expected = draw(other, args[:-1])
        for name, value in draw(guide, args).items():
            torch.testing.assert_close(value, expected[name])


@pairs_where(lambda entry, model: not entry.mini_batches and model not in WITHOUT_MINI_BATCHES)
def test_mini_batches_refused(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    with pytest.raises(ValueError, match="while plate 'data', which their score sums over, is subsampled"):
        guide(*problem.batch(torch.tensor([3, 1])))


def random_rows(y):
    """A model that draws its own mini-batch."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 6, subsample_size=2) as idx:
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(loc + x.sum(-1), 1.0), obs=y[idx])


@pytest.mark.parametrize(
    "guide_id", [guide for guide, entry in GUIDES.items() if entry.mini_batches and "local" in entry.models]
)
def test_random_mini_batches(guide_id):
    problem = Problem(random_rows, (torch.randn(6),), "x", 1, ("x",), local={"local_plate": "data"})
    guide = GUIDES[guide_id].make(problem)
    for _ in range(2):
        trace = poutine.trace(guide).get_trace(*problem.args)
        replayed = poutine.trace(poutine.replay(random_rows, trace)).get_trace(*problem.args)
        assert torch.equal(trace.nodes["data"]["value"], replayed.nodes["data"]["value"])
        assert trace.nodes["x"]["scale"] == replayed.nodes["x"]["scale"] == 3.0
        assert trace.nodes["x"]["value"].shape == (2, 2)
    assert loss_at(problem, guide).isfinite()
