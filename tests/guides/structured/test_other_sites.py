"""Latent sites beside the process."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroSample
from pyro.poutine.messenger import Messenger

from pyro_lvgp.distributions import GaussianProcess
from pyro_lvgp.guides import MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.infer.elbo import structured as structured_elbo
from pyro_lvgp.kernels import RBF
from pyro_lvgp.networks import FactorNet, IndexNet, mask_entries
from tests.helpers.structured import D, N, Q, make_data, make_model, two_processes

pytestmark = pytest.mark.usefixtures("float64")


def test_other_sites_are_those_of_a_mean_field_guide():
    """Also on the half-line, with the init_scale asked for."""
    model = make_model()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.5, 1.0))
    guide, other = (
        StructuredGPGuide(model, encoders={"f": FactorNet(D, Q)}, init_scale=0.2),
        MeanFieldGuide(model, init_scale=0.2),
    )
    args = make_data()
    for g, part in ((guide, guide.mean_field), (other, other)):
        g(*args)
        part.locs.likelihood.variance = torch.tensor(-0.3)
    ours, theirs = (poutine.trace(g).get_trace(*args).nodes["likelihood.variance"]["fn"] for g in (guide, other))
    value = torch.rand(())
    torch.testing.assert_close(ours.log_prob(value), theirs.log_prob(value))


def test_other_sites_start_where_they_are_told():
    model = make_model()
    model.likelihood.variance = PyroSample(dist.LogNormal(0.5, 1.0))
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, Q)}, init_loc_fn=lambda site: torch.tensor(3.0))
    args = make_data()
    guide(*args)
    torch.testing.assert_close(guide.median(*args)["likelihood.variance"], torch.tensor(3.0))


def test_the_guide_leaves_the_model_after_its_last_latent_site():
    """Out of plates too; no handler stays behind."""
    reached = []

    def model(t, y):
        f = pyro.sample("f", GaussianProcess(RBF(1), t))
        with pyro.plate("rows", 2, dim=-1), poutine.scale(scale=0.5):
            pyro.sample("scale", dist.LogNormal(0.0, 1.0))
            reached.append(f)
            pyro.sample("y", dist.Normal(f.sum(-1, keepdim=True), 1.0), obs=torch.zeros(2))

    guide, t, y = StructuredGPGuide(model, encoders={"f": FactorNet(D, 1)}), torch.rand(N, 1), torch.randn(N, D)
    guide(t, y)
    reached.clear()
    for _ in range(2):
        trace = poutine.trace(guide).get_trace(t, y)
        assert not reached
        assert not pyro.poutine.runtime._PYRO_STACK
    replayed = poutine.trace(poutine.replay(model, trace)).get_trace(t, y)
    assert len(reached) == 1
    for name in ("f", "scale"):
        assert torch.equal(replayed.nodes[name]["value"], trace.nodes[name]["value"])
        assert replayed.nodes[name]["scale"] == trace.nodes[name]["scale"] == (0.5 if name == "scale" else 1.0)


def test_processes_are_looked_at_once(monkeypatch):
    """Though particles and masking wrap the guide anew at every step."""
    looks = []
    monkeypatch.setattr(
        structured_elbo._CheckIndependence, "__init__", lambda self: looks.append(0) or Messenger.__init__(self)
    )
    monkeypatch.setattr(structured_elbo._CheckIndependence, "_pyro_sample", lambda self, msg: None)
    t, y = torch.rand(N, 1), torch.randn(N, 1)
    guide = StructuredGPGuide(two_processes, encoders={"f": IndexNet(1, 1), "log.variance": None})
    bound = StructuredELBO(num_particles=2, max_plate_nesting=0, corruption=mask_entries(0.5))
    for _ in range(3):
        bound.loss_and_grads(two_processes, guide, t, y)
    assert len(looks) == 1
