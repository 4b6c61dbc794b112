"""The quadratic form of a Gaussian likelihood beside the entries it stands for."""

import pyro
import pytest
import torch
from pyro import poutine

from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.guides import MeanFieldGuide
from pyro_lvgp.infer import ImportanceWeightedELBO, MeanFieldELBO
from pyro_lvgp.likelihoods import Gaussian, Likelihood
from pyro_lvgp.models import BayesianGPLVM
from pyro_lvgp.ops.expected_log_likelihood import evaluate, gaussian_quadratic
from pyro_lvgp.ops.linalg import sparse_conditional

N, D, M = 7, 5, 4


def problem(*, missing, uncertain, particles=()):
    torch.manual_seed(0)
    residual = torch.randn(N, D, dtype=torch.float64)
    observed = torch.rand(N, D) > 0.5 if missing else torch.ones(N, D, dtype=torch.bool)
    if missing:
        observed[0] = True
        observed[1] = False
    precision = torch.rand(D, dtype=torch.float64) + 0.5
    u = torch.randn(*particles, D, M, dtype=torch.float64)
    L = torch.randn(D, M, M, dtype=torch.float64).tril() if uncertain else None
    a = 0.4 * torch.randn(*particles, M, N, dtype=torch.float64)
    return residual, observed, precision, u, L, a


@pytest.mark.parametrize("particles", [(), (3,)])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("uncertain", [False, True])
def test_form_is_the_sum_over_entries(missing, uncertain, particles):
    residual, observed, precision, u, L, a = problem(missing=missing, uncertain=uncertain, particles=particles)
    variance = a.square().sum(-2) + 0.3
    # Luu = I, so that a is the kernel vector itself.
    identity = torch.eye(M, dtype=torch.float64)
    mean, f_variance = sparse_conditional(identity, a, variance, u, L)
    gaussian = Gaussian(precision.reciprocal(), data_dim=D)
    entries = gaussian.expected_log_prob(residual, mean, f_variance, precision.reciprocal())
    want = torch.where(observed, entries, 0.0).sum(-1)
    form = gaussian_quadratic(residual, observed if missing else None, precision, u, L)
    assert torch.allclose(evaluate(form, a.mT, variance), want)
    assert (form.deficit is None) == (not missing)


@pytest.mark.parametrize("particles", [(), (3,)])
@pytest.mark.parametrize("missing", [False, True])
def test_indices_of_incomplete_rows_give_the_same_form(missing, particles):
    residual, observed, precision, u, L, a = problem(missing=missing, uncertain=True, particles=particles)
    variance = a.square().sum(-2) + 0.3
    everywhere = gaussian_quadratic(residual, observed, precision, u, L)
    incomplete = (~observed.all(-1)).nonzero().squeeze(-1)
    some = gaussian_quadratic(residual, observed, precision, u, L, incomplete)
    for one, other in zip(some, everywhere, strict=True):
        torch.testing.assert_close(one, other)
    if not missing:
        complete = gaussian_quadratic(residual, None, precision, u, L)
        torch.testing.assert_close(evaluate(complete, a.mT, variance), evaluate(everywhere, a.mT, variance))


class _EntrywiseGaussian(Likelihood):
    """The Gaussian likelihood as somebody else would write it: the model does not know its quadratic form."""

    def __init__(self, twin):
        super().__init__()
        self.twin = twin

    def params(self):
        return self.twin.params()

    def distribution(self, f, params):
        return self.twin.distribution(f, params)

    def expected_log_prob(self, y, mean, variance, params):
        return self.twin.expected_log_prob(y, mean, variance, params)

    def inverse_link(self, y):
        return y


@pytest.mark.parametrize(
    "loss",
    [
        MeanFieldELBO(max_plate_nesting=1),
        ImportanceWeightedELBO(num_samples=3, max_plate_nesting=1),
        ImportanceWeightedELBO(num_samples=3, marginalize=False, max_plate_nesting=1),
    ],
    ids=["mean-field", "importance-weighted", "drawn"],
)
@pytest.mark.parametrize("outputs", [None, 3], ids=["one-variance", "variances"])
def test_bounds_and_gradients_are_those_of_the_entries(loss, outputs):
    Y = torch.randn(9, 3, dtype=torch.float64)
    Y[2, 1] = Y[4, 0] = Y[4, 2] = torch.nan
    results = []
    for wrap in (lambda likelihood: likelihood, _EntrywiseGaussian):
        pyro.clear_param_store()
        torch.manual_seed(0)
        gaussian = Gaussian(data_dim=outputs).double()
        model = BayesianGPLVM(9, 3, 2, num_inducing=4, likelihood=wrap(gaussian)).double().initialize(Y)
        guide = MeanFieldGuide(model)
        guide(Y)
        torch.manual_seed(1)
        idx = torch.tensor([4, 1, 2])
        value = loss.differentiable_loss(model, guide, Y[idx], idx)
        value.backward()
        parts = {**dict(model.named_parameters()), **dict(guide.named_parameters(prefix="guide"))}
        results.append((value, {name.replace("twin.", ""): p.grad for name, p in parts.items()}))
    (fast, fast_gradients), (slow, slow_gradients) = results
    assert torch.allclose(fast, slow)
    assert fast_gradients.keys() == slow_gradients.keys()
    for name, expected in slow_gradients.items():
        assert torch.allclose(fast_gradients[name], expected, atol=1e-9), name


def test_observed_rows_know_entries_and_other_values():
    Y = torch.randn(6, 3)
    model = BayesianGPLVM(6, 3, 2, num_inducing=3)
    rows = poutine.trace(model).get_trace(Y).nodes["y"]["fn"]
    assert isinstance(rows.rows.base_dist.base_dist, LikelihoodPredictive)
    other = torch.randn(6, 3)
    assert torch.allclose(rows.log_prob(other), rows.rows.base_dist.log_prob(other).sum(-1))
    assert rows.expand(rows.batch_shape) is rows
    assert rows.expand((2, 6)).log_prob(Y).shape == (2, 6)
    assert rows.sample().shape == (6, 3)
    assert torch.equal(rows.mean, rows.rows.base_dist.mean)
    assert torch.equal(rows.variance, rows.rows.base_dist.variance)
