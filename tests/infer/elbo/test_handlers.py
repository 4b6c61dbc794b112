"""Gaussian sites that a bound marginalises: the statement of the model under the handlers of bounds and guides."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, MarginalizeGaussians, MeanFieldELBO, Moments, sample_moments
from pyro_lvgp.infer.elbo.handlers import (
    EvaluateBound,
    MarginalizeOwnGaussians,
    gaussian_moments,
    is_in_bound,
    marginalizes_gaussians,
)

LOC, TRIL = torch.tensor([0.5, -1.0]), torch.tensor([[1.0, 0.0], [0.5, 2.0]])


def model():
    return sample_moments("u", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer={"covariance": "full"})


def guide():
    return pyro.sample("u", dist.MultivariateNormal(LOC, scale_tril=TRIL))


def marginalized(model, guide_trace):
    return poutine.replay(MarginalizeGaussians(guide_trace)(model), guide_trace)


def test_without_a_bound_the_site_is_drawn():
    trace = poutine.trace(model).get_trace()
    moments = trace.nodes["_RETURN"]["value"]
    assert isinstance(moments, Moments)
    assert moments.scale_tril is None
    assert moments.mean is trace.nodes["u"]["value"]
    assert trace.nodes["u"]["infer"] == {"covariance": "full"}


def test_a_bound_gives_the_moments_of_the_guide_and_traces_record_the_draw():
    guide_trace = poutine.trace(guide).get_trace()
    trace = poutine.trace(marginalized(model, guide_trace)).get_trace()
    moments = trace.nodes["_RETURN"]["value"]
    assert torch.equal(moments.mean, LOC)
    assert torch.equal(moments.scale_tril, TRIL)
    assert torch.equal(trace.nodes["u"]["value"], guide_trace.nodes["u"]["value"])
    assert list(trace.stochastic_nodes) == ["u"]


def test_under_replay_and_condition_alone_the_value_stands():
    guide_trace = poutine.trace(guide).get_trace()
    for known in (poutine.replay(model, guide_trace), poutine.condition(model, {"u": guide_trace.nodes["u"]["value"]})):
        moments = known()
        assert torch.equal(moments.mean, guide_trace.nodes["u"]["value"])
        assert moments.scale_tril is None


def test_a_conditioned_model_is_marginalized_all_the_same():
    guide_trace = poutine.trace(guide).get_trace()
    moments = marginalized(poutine.condition(model, {"u": torch.zeros(2)}), guide_trace)()
    assert torch.equal(moments.mean, LOC)


def test_moments_in_plates_have_their_batch_dimensions():
    def in_plates(fn):
        with pyro.plate("rows", 3, dim=-1):
            return fn()

    guide_trace = poutine.trace(in_plates).get_trace(guide)
    moments = marginalized(in_plates, guide_trace)(model)
    assert moments.mean.shape == (3, 2)
    assert moments.scale_tril.shape == (3, 2, 2)


@pytest.mark.parametrize("hidden", [{}, {"hide": ["u"]}])
def test_block_hides_a_site_from_the_bound(hidden):
    guide_trace = poutine.trace(guide).get_trace()
    assert marginalized(poutine.block(model, **hidden), guide_trace)().scale_tril is None


def test_sites_that_are_not_gaussian_or_not_in_the_guide_stay_drawn():
    def laplace():
        pyro.sample("u", dist.Laplace(torch.zeros(2), 1.0).to_event(1))

    for other in (laplace, lambda: None):
        assert marginalized(model, poutine.trace(other).get_trace())().scale_tril is None


def test_infer_of_the_model_is_left_alone():
    infer = {"covariance": "full"}
    guide_trace = poutine.trace(guide).get_trace()
    marginalized(lambda: sample_moments("u", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer=infer), guide_trace)()
    assert infer == {"covariance": "full"}


def test_a_guide_that_runs_the_model_gives_its_own_moments():
    class Replace(poutine.messenger.Messenger):
        def _pyro_sample(self, msg):
            msg["fn"] = dist.MultivariateNormal(LOC, scale_tril=TRIL)

    with poutine.trace() as tracer, MarginalizeOwnGaussians(), Replace():
        moments = model()
    assert torch.equal(moments.mean, LOC)
    assert not torch.equal(tracer.trace.nodes["u"]["value"], LOC)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (dist.Normal(torch.zeros(2), 2.0).to_event(1), torch.eye(2) * 2.0),
        (dist.MultivariateNormal(LOC, scale_tril=TRIL), TRIL),
        (dist.Normal(torch.zeros(2), 2.0), None),
        (dist.Normal(torch.zeros(2), 2.0).mask(False).to_event(1), None),
        (dist.LogNormal(torch.zeros(2), 2.0).to_event(1), None),
        (None, None),
    ],
)
def test_moments_of_gaussians_over_vectors_alone(fn, expected):
    moments = gaussian_moments(fn)
    if expected is None:
        assert moments is None
    else:
        assert torch.equal(moments.scale_tril, expected)


def regression(X, y):
    w, scale_tril = sample_moments("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)
        if scale_tril is not None:
            pyro.factor("variance", -0.5 * (X @ scale_tril).square().sum(-1))


def test_the_bound_of_a_users_own_model_is_the_closed_form():
    torch.manual_seed(0)
    X, y = torch.randn(6, 2), torch.randn(6)
    q = MeanFieldGuide(regression, covariance={"w": "full"}, init_scale=0.3)
    q(X, y)
    m, S = q.median()["w"], 0.3**2 * torch.eye(2)
    expected = -0.5 * ((y - X @ m).square() + (X @ S * X).sum(-1) + math.log(2.0 * math.pi)).sum()
    expected = expected - torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(m, S), torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    )
    for bound in (MeanFieldELBO(max_plate_nesting=1), MeanFieldELBO(num_samples=1, max_plate_nesting=1)):
        assert bound.loss(regression, q, X, y) == pytest.approx(-expected.item(), rel=1e-5)
    drawn = ImportanceWeightedELBO(num_samples=1, marginalize=False, max_plate_nesting=1)
    assert len({drawn.loss(regression, q, X, y) for _ in range(3)}) == 3


def test_a_guide_can_ask_for_the_bound_that_runs_it():
    found = []

    def asking(X, y):
        found.append((is_in_bound(), marginalizes_gaussians()))
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    X, y = torch.ones(3, 2), torch.ones(3)
    MeanFieldELBO(max_plate_nesting=1).loss(regression, asking, X, y)
    ImportanceWeightedELBO(marginalize=False, max_plate_nesting=1).loss(regression, asking, X, y)
    Trace_ELBO(max_plate_nesting=1).loss(regression, asking, X, y)
    asking(X, y)
    assert found == [(True, True), (True, False), (False, False), (False, False)]
    with EvaluateBound(marginalize=True), EvaluateBound():
        assert marginalizes_gaussians()
