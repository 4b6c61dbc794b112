"""Posterior draws chosen from candidates by their weights."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from tests.guides.annealed.guide._models import standard_error

pytestmark = pytest.mark.usefixtures("float64")


def model():
    """A Gaussian posterior with a correlation, so that mean-field Gaussians are too narrow."""
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    total = pyro.deterministic("total", x.sum(-1))
    pyro.sample("y", dist.Normal(total, 2.0**0.5), obs=torch.tensor(2.0))


class Counted:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.num_calls = function, 0

    def __call__(self):
        self.num_calls += 1
        return self.function()


COVARIANCE = (torch.eye(2).double() + 0.5).inverse()
MEAN = COVARIANCE.sum(-1)


def annealed(num_steps=1):
    """Chains too short to leave the base, which is that of the best mean-field Gaussian."""
    base = MeanFieldGuide(model)
    guide = AutoAnnealedLangevin(model, num_steps=num_steps, step_size=1e-3, base_guide=base)
    guide()
    base.set_loc_and_stddev("x", MEAN.clone(), torch.full((2,), 1.5**-0.5))
    return guide


def errors(guide, **options):
    """Standard errors between the posterior's means and mean squares and those of draws."""
    x = guide.sample_posterior(40_000, chunk_size=200_000, **options)["x"] - MEAN
    squares = x.square()
    return torch.stack([x.mean(0) / standard_error(x), (squares.mean(0) - COVARIANCE.diagonal()) / standard_error(squares)])


def test_draws_from_many_candidates_are_those_of_the_posterior():
    guide = annealed()
    one, few = (errors(guide, num_candidates=num)[1] for num in (1, None))
    assert (one < -10.0).all()
    assert (few > one + 1.5).all()
    assert (errors(guide, num_candidates=30).abs() < 4.0).all()


def test_sites_of_one_draw_come_from_one_candidate():
    for vectorize in (True, False):
        draws = annealed().sample_posterior(20, num_candidates=3, vectorize=vectorize)
        assert draws["x"].shape == (20, 2)
        assert torch.equal(draws["total"], draws["x"].sum(-1))


def test_candidates_by_default_are_several_for_joint_chains_and_one_for_local_chains(monkeypatch):
    def rows():
        with pyro.plate("rows", 3):
            pyro.sample("x", dist.Normal(0.0, 1.0))

    for guide, expected in ((AutoAnnealedLangevin(rows), 4), (AutoAnnealedLangevin(rows, local_plate="rows"), 1)):
        guide()
        counted = Counted(guide.forward)
        monkeypatch.setattr(guide, "forward", counted)
        with poutine.trace() as outside:
            guide.sample_posterior(1, vectorize=False)
        assert counted.num_calls == 1 + expected
        assert not outside.trace.nodes
