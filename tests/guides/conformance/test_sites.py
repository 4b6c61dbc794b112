"""Sites of every guide, their draws, medians and quantiles."""

import pytest
import torch
from pyro import poutine
from pyro.distributions.transforms import biject_to
from pyro.infer import Predictive

from pyro_lvgp.guides import (
    AutoAnnealedLangevin,
    StructuredGPGuide,
)
from pyro_lvgp.networks import ZeroImputation
from tests.guides.conformance._guides import (
    MODELS,
    draw,
    every_pair,
    latent_sites,
    loss_at,
    mean_field,
    random_features,
    start,
    tensors,
)


@every_pair
def test_sites_match_the_model_s(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    trace = poutine.trace(guide).get_trace(*problem.args)
    replayed = poutine.trace(poutine.replay(problem.model, trace)).get_trace(*problem.args)
    trace.compute_log_prob()
    replayed.compute_log_prob()
    for name in latent_sites(problem):
        ours, theirs = trace.nodes[name], replayed.nodes[name]
        assert ours["fn"].batch_shape == theirs["fn"].batch_shape
        assert ours["fn"].event_shape == theirs["fn"].event_shape
        assert {f.name for f in ours["cond_indep_stack"]} == {f.name for f in theirs["cond_indep_stack"]}
        assert torch.equal(ours["value"], theirs["value"])
        assert theirs["fn"].support.check(ours["value"]).all()
        assert ours["log_prob"].shape == theirs["log_prob"].shape
        assert ours["log_prob"].isfinite().all()
        assert theirs["log_prob"].isfinite().all()


@every_pair
def test_median_and_quantiles(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    draws = {"num_samples": 10, "seed": 3} if isinstance(guide, AutoAnnealedLangevin) else {}
    state = torch.get_rng_state()
    median = guide.median(*problem.args, **draws)
    quantiles = guide.quantiles([0.1, 0.5, 0.9], *problem.args, **draws)
    assert torch.equal(state, torch.get_rng_state())
    latents = latent_sites(problem)
    assert set(median) == set(quantiles) == set(latents)
    for name, site in latents.items():
        support = site["fn"].support
        assert quantiles[name].shape == (3, *site["value"].shape)
        torch.testing.assert_close(quantiles[name][1], median[name])
        assert support.check(quantiles[name]).all(), name
        # Coordinates of a simplex have no order of their own.
        assert (biject_to(support).inv(quantiles[name]).diff(dim=0) > 0.0).all(), name
    conditioned = poutine.trace(poutine.condition(problem.model, median)).get_trace(*problem.args)
    assert conditioned.log_prob_sum().isfinite()


@pytest.mark.parametrize(
    ("model_id", "make", "message"),
    [
        ("local", lambda p: mean_field(p._replace(vector="z")), "one of .*'x'.*, got 'z'"),
        ("gplvm", lambda p: AutoAnnealedLangevin(p.model, sites=["z"]), r"among \['X', 'u'\], got \['z'\]"),
        ("gp", lambda p: StructuredGPGuide(p.model, encoders={"z": None}), "one of .*'f'.*, got 'z'"),
        (
            "rflvm",
            lambda p: random_features(p, weights="shared", encoders={"X": ZeroImputation(4, 3, [8])}),
            "loc and scale of shape",
        ),
    ],
)
def test_a_first_call_that_fails_is_made_again(model_id, make, message):
    problem = MODELS[model_id](torch.float32)
    guide = make(problem)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            guide(*problem.args)


@every_pair
@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
def test_predictive(guide_id, model_id, parallel):
    problem, guide = start(guide_id, model_id)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            samples = Predictive(problem.model, guide=guide, num_samples=3, parallel=parallel)(*problem.args)
        for name, site in latent_sites(problem).items():
            value = samples[name].reshape(3, *site["value"].shape)
            assert site["fn"].support.check(value).all(), name
            assert not torch.equal(value[0], value[1]), name


@every_pair
def test_draws_do_not_depend_on_the_gradient_mode(guide_id, model_id):
    problem, guide = start(guide_id, model_id)
    expected = draw(guide, problem.args)
    assert all(value.requires_grad for value in expected.values())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            values = draw(guide, [arg.clone() for arg in problem.args])
        for name, value in values.items():
            assert not value.requires_grad
            torch.testing.assert_close(value, expected[name].detach())


@every_pair
def test_dtype(guide_id, model_id, dtype):
    problem, guide = start(guide_id, model_id, dtype)
    for name, tensor in tensors(guide).items():
        assert tensor.dtype == dtype, name
    for name, value in guide(*problem.args).items():
        assert value.dtype == dtype, name
    assert loss_at(problem, guide).dtype == dtype
