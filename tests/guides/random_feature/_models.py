"""Traces of model and guide, and settled variational parameters."""

from pyro import poutine

from tests.helpers.random_features import pin


def traces_of(model, guide, Y):
    guide_trace = poutine.trace(guide).get_trace(Y)
    model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(Y)
    guide_trace.compute_log_prob()
    model_trace.compute_log_prob()
    return guide_trace.nodes, model_trace.nodes


def settle(guide, Y):
    """Pin a guide, and let its variational parameters converge."""
    pin(guide)
    for _ in range(60):
        guide.a.c = guide._update_weights(Y)["guide.a.c"]
