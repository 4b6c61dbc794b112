"""Weights of rows, in every bound: the bound is linear in them, and a weight of 2 is the row twice."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.guides import AutoAnnealedLangevin, MeanFieldGuide
from pyro_lvgp.infer import CompiledELBO, ImportanceWeightedELBO, JointOptim, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import BayesianGPLVM, RowArguments
from tests.models.gplvm._models import D, M, N, Q, with_holes

pytestmark = pytest.mark.usefixtures("float64")

BOUNDS = {
    "Trace_ELBO": Trace_ELBO,
    "TraceMeanField_ELBO": TraceMeanField_ELBO,
    "MeanFieldELBO": lambda: MeanFieldELBO(max_plate_nesting=1),
    "ImportanceWeightedELBO": lambda: ImportanceWeightedELBO(num_samples=3, max_plate_nesting=1),
    "one sample": lambda: ImportanceWeightedELBO(num_samples=1, max_plate_nesting=1),
    "StructuredELBO": lambda: StructuredELBO(max_plate_nesting=1),
}


class Traced(BayesianGPLVM):
    """Model whose chains trace it."""

    def forward(self, y=None, idx=None, rows=None):
        return super().forward(y, idx, rows)


GUIDES = {
    "mean-field": (BayesianGPLVM, MeanFieldGuide),
    "annealed": (BayesianGPLVM, lambda model: AutoAnnealedLangevin(model, num_steps=3, step_size=0.1)),
    "annealed, traced": (Traced, lambda model: AutoAnnealedLangevin(model, num_steps=3, step_size=0.1, local_plate="data")),
}


def make(cls, weight, Y, **kwargs):
    rows = None if weight is None else RowArguments(weight=weight)
    return cls(len(Y), D, Q, num_inducing=min(M, len(Y)), rows=rows, **kwargs).initialize(Y)


# Traced chains under a bound of each kind: of one draw, with analytic terms, of weights.
OF_TRACED = {"Trace_ELBO", "MeanFieldELBO", "ImportanceWeightedELBO"}
PAIRS = [(kind, name) for kind in GUIDES for name in BOUNDS if kind != "annealed, traced" or name in OF_TRACED]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_bounds_are_linear_in_the_weights(kind, name):
    """With the same random numbers: B(w) = B(0) + Σ wₙ (B(eₙ) − B(0)), and B(1) is the bound without weights."""
    cls, make_guide = GUIDES[kind]
    Y = with_holes(torch.randn(4, D))

    def bound(weight):
        with seeded(0):
            torch.manual_seed(0)
            model = make(cls, weight, Y)
            guide = make_guide(model)
            return -BOUNDS[name]().loss(model, guide, Y)

    weight = torch.tensor([0.3, 1.0, 2.0, 0.5])
    none = bound(torch.zeros(4))
    of_rows = torch.tensor([bound(unit) - none for unit in torch.eye(4)])
    assert (of_rows.abs() > 1e-3).all()
    assert bound(weight) == pytest.approx(none + float(weight @ of_rows), rel=1e-8)
    assert bound(torch.ones(4)) == pytest.approx(bound(None), rel=1e-8)


def test_a_weight_of_two_is_the_row_twice_and_of_zero_is_no_row():
    """At latents with little variance, where draws make no difference."""
    Y, weight = torch.randn(N, D), torch.tensor([0.0, 1.0, 2.0]).repeat(4)
    copies = torch.arange(N).repeat_interleave(weight.long())
    first = make(BayesianGPLVM, weight, Y)
    second = BayesianGPLVM(len(copies), D, Q, num_inducing=M)
    second.load_state_dict({name: value for name, value in first.state_dict().items() if name != "row_weight"})
    second.initial_values = {"X": first.initial_values["X"][copies], "u": first.initial_values["u"]}
    bounds = [
        MeanFieldELBO(max_plate_nesting=1).loss(model, MeanFieldGuide(model, init_scale=1e-5), rows)
        for model, rows in ((first, Y), (second, Y[copies]))
    ]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-5)


@pytest.mark.parametrize("make_guide", [make_guide for _, make_guide in GUIDES.values()])
def test_a_mini_batch_has_the_weights_of_its_rows_times_the_scale_of_the_batch(make_guide):
    Y, weight = torch.randn(N, D), torch.rand(N)
    model = make(BayesianGPLVM, weight, Y)
    guide, idx = make_guide(model), torch.tensor([7, 2, 5, 0])
    trace = poutine.trace(guide).get_trace(Y[idx], idx)
    of_model = poutine.trace(poutine.replay(model, trace)).get_trace(Y[idx], idx)
    for site in (trace.nodes["X"], of_model.nodes["X"], of_model.nodes["y"]):
        torch.testing.assert_close(site["scale"], weight[idx] * N / 4)


def test_rows_without_weight_do_not_change_and_steps_are_those_of_a_graph():
    Y, weight = torch.randn(N, D), torch.ones(N)
    weight[3] = 0.0
    results = []
    for backend in (None, "torchscript"):
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = make(BayesianGPLVM, weight, Y)
        guide = MeanFieldGuide(model)
        bound = MeanFieldELBO(max_plate_nesting=1)
        loss = bound if backend is None else CompiledELBO(bound, backend=backend)
        guide(Y)
        before = guide.locs.X.detach().clone()
        optim = JointOptim(torch.optim.SGD, {"lr": 1e-3})
        fit(model, guide, Y, loss=loss, optim=optim, num_steps=5, batch_size=4, progress=False)
        assert torch.equal(guide.locs.X[3], before[3])
        assert not torch.equal(guide.locs.X, before)
        results.append(guide.locs.X.detach().clone())
    torch.testing.assert_close(*results)


def test_chains_of_all_latents_jointly_refuse_weights():
    Y = torch.randn(N, D)
    model = make(BayesianGPLVM, torch.ones(N), Y)
    guide = AutoAnnealedLangevin(model, sites=["X", "u"], num_steps=2)
    with pytest.raises(ValueError, match="expected rows without weights for a chain of all latents jointly"):
        guide(Y)


def test_weights_of_rows_of_counts():
    Y = torch.poisson(3.0 * torch.ones(N, D))
    model = make(BayesianGPLVM, 2.0 * torch.ones(N), Y, likelihood=Poisson())
    other = make(BayesianGPLVM, None, Y, likelihood=Poisson())
    other.load_state_dict({name: value for name, value in model.state_dict().items() if name != "row_weight"})
    values = {"X": torch.randn(N, Q), "u": torch.randn(D, M)}
    traces = [poutine.trace(poutine.condition(each, values)).get_trace(Y) for each in (model, other)]
    for trace in traces:
        trace.compute_log_prob()
    for name in ("X", "y"):
        torch.testing.assert_close(traces[0].nodes[name]["log_prob_sum"], 2.0 * traces[1].nodes[name]["log_prob_sum"])
    assert traces[0].nodes["u"]["log_prob_sum"] == traces[1].nodes["u"]["log_prob_sum"]


@pytest.mark.parametrize("make_bound", [lambda: MeanFieldELBO(), lambda: ImportanceWeightedELBO(), lambda: StructuredELBO()])
def test_guides_without_the_plate_of_the_model_are_refused(make_bound):
    Y, bounds = torch.randn(N, D), []
    for weight in (torch.ones(N), None):
        torch.manual_seed(0)
        model = make(BayesianGPLVM, weight, Y)
        guide = AutoNormal(model, create_plates=model.create_plates)
        bounds.append(make_bound().loss(model, guide, Y))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-8)
    model = make(BayesianGPLVM, torch.ones(N), Y)
    with pytest.raises(ValueError, match=r"create_plates=model\.create_plates"):
        make_bound().loss(model, AutoNormal(model), Y)
