"""Particles of a vectorised trace, one by one."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.poutine.util import prune_subsample_sites

from pyro_lvgp._utils.seeding import seeded


def losses_of_particles(model, guide, *args, num_particles):
    """log q(z) − log p(y, z) at each draw z of a guide in a plate of particles, from traces without the plate.

    The rightmost dimension left of the particles is that of the plates of the model.
    """
    with pyro.plate("particles", num_particles, dim=-2):
        drawn = prune_subsample_sites(poutine.trace(guide).get_trace(*args))
    losses = []
    for number in range(num_particles):
        values = {}
        for name, site in drawn.iter_stochastic_nodes():
            event_dim = site["fn"].event_dim
            values[name] = site["value"].select(-2 - event_dim, number)
            if all(frame.dim != -1 for frame in site["cond_indep_stack"]):
                values[name] = values[name].squeeze(-1 - event_dim)
        of_guide, of_model = (poutine.trace(poutine.condition(part, values)).get_trace(*args) for part in (guide, model))
        losses.append(of_guide.log_prob_sum() - of_model.log_prob_sum())
    return torch.stack(losses).detach()


def assert_particles_are_those_one_by_one(model, guide, *args, num_particles=8):
    """The vectorised bound is the mean over its particles, which have draws of their own."""
    with seeded(0):
        bound = Trace_ELBO(num_particles=num_particles, vectorize_particles=True, max_plate_nesting=1)
        vectorised = bound.loss(model, guide, *args)
    with seeded(0):
        losses = losses_of_particles(model, guide, *args, num_particles=num_particles)
    assert len(losses.unique()) == num_particles
    assert vectorised == pytest.approx(losses.mean().item(), rel=1e-9)


def log_joints_of_draws(model, Y, X, u, num_draws):
    """Log joint density at one X and u, for each draw of what a model draws besides."""
    values = {"X": X.expand(num_draws, *X.shape), "u": u.expand(num_draws, *u.shape)}
    with pyro.plate("draws", num_draws, dim=-2):
        trace = poutine.trace(poutine.condition(model, values)).get_trace(Y)
    trace.compute_log_prob()
    return sum(trace.nodes[name]["log_prob"].reshape(num_draws, -1).sum(1) for name in ("u", "X", "y")).detach()
