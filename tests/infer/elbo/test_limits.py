"""Bounds above the largest log likelihood that the data can have raise an error; possible ones are not touched."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_lvgp._utils.density_limits import log_prob_limit
from pyro_lvgp.distributions import LikelihoodPredictive
from pyro_lvgp.guides import MeanFieldGuide, StructuredGPGuide
from pyro_lvgp.infer import CompiledELBO, JointAdam, MeanFieldELBO, StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Bernoulli, Gaussian, Heterogeneous, LogNormal, NegativeBinomial, Ordinal, Poisson, StudentT
from pyro_lvgp.models import GPVAE, BayesianGPLVM
from pyro_lvgp.networks import MLP, IndexNet

LIKELIHOODS = [
    Gaussian(0.01),
    StudentT(0.1),
    LogNormal(0.1),
    Bernoulli(),
    Poisson(),
    NegativeBinomial(3.0),
    Ordinal(torch.tensor([-0.5, 0.5])),
]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda likelihood: type(likelihood).__name__)
def test_limits_are_suprema_over_functions(likelihood):
    y = torch.tensor([1.0, 0.0]) if likelihood.fill_value == 0.0 else torch.tensor([1.0, 3.0])
    f = torch.linspace(-60.0, 60.0, 20_001)[:, None]
    entries = likelihood.distribution(f, likelihood.params())
    largest = entries.log_prob(y).max(0).values
    limit = log_prob_limit(entries, y)[0]
    assert (largest <= limit + 1e-4).all()
    is_tight = isinstance(likelihood, Gaussian | StudentT | LogNormal | Bernoulli)
    if is_tight:
        torch.testing.assert_close(largest, limit, rtol=0.0, atol=2e-3)
    predictive = LikelihoodPredictive(likelihood, f, torch.ones(()), "svgp", likelihood.params())
    torch.testing.assert_close(log_prob_limit(predictive.to_event(1), y)[0], limit.sum())


def test_limits_of_columns_masks_and_unknown_families():
    kinds = Heterogeneous([(Gaussian(1.0), [1]), (Bernoulli(), [0])])
    entries = kinds.distribution(torch.zeros(1, 2), kinds.params())
    expected = torch.tensor([[0.0, -0.5 * math.log(2.0 * math.pi)]])
    torch.testing.assert_close(log_prob_limit(entries, torch.ones(1, 2)), expected)
    masked = entries.mask(torch.tensor([[True, False]]))
    assert (log_prob_limit(masked, torch.ones(1, 2)) == 0.0).all()
    assert log_prob_limit(dist.Gamma(2.0, 3.0), torch.ones(())) == math.inf
    assert log_prob_limit(dist.Delta(torch.zeros(())), torch.zeros(())) == math.inf


class Wrong(Bernoulli):
    """Likelihood whose expectation is wrong, as that of a quadrature with too few nodes."""

    excess = 10.0

    def expected_log_prob(self, y, mean, variance, params):
        return super().expected_log_prob(y, mean, variance, params) + self.excess


def make_wrong(excess=10.0):
    model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5, likelihood=Wrong())
    model.likelihood.excess = excess
    return model, MeanFieldGuide(model), (torch.rand(20, 3) < 0.5).float()


COMPILED = [CompiledELBO(bound, backend="eager") for bound in (Trace_ELBO(), MeanFieldELBO())]


@pytest.mark.parametrize(
    "loss", [MeanFieldELBO(), Trace_ELBO(), *COMPILED], ids=["own", "pyro", "compiled pyro", "compiled own"]
)
def test_an_impossible_bound_raises_before_a_parameter_changes(loss):
    model, guide, Y = make_wrong()
    guide(Y)
    before = {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    with pytest.raises(ValueError, match="expected a bound of at most 0 nats"):
        fit(model, guide, Y, loss=loss, num_steps=3, progress=False)
    assert before
    for name, value in before.items():
        torch.testing.assert_close(pyro.param(name), value, rtol=0.0, atol=0.0)


def test_steps_of_a_compiled_graph_are_checked():
    model, guide, Y = make_wrong(excess=0.0)
    loss = CompiledELBO(Trace_ELBO(), backend="eager")
    for _ in range(2):
        loss.loss_and_grads(model, guide, Y)
    loss._steps[next(iter(loss._steps))].run = lambda *_: [torch.tensor(-1e3), *(None for _ in pyro.get_param_store())]
    with pytest.raises(ValueError, match="at most 0 nats"):
        loss.loss_and_grads(model, guide, Y)


def test_own_bounds_check_under_pyro_s_svi_too():
    model, guide, Y = make_wrong()
    svi = SVI(model, guide, JointAdam(), MeanFieldELBO())
    for call in (svi.step, svi.evaluate_loss):
        with pytest.raises(ValueError, match="at most 0 nats"):
            call(Y)


def model_of_known_mean(y, sd):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0 * x, sd), obs=y)


def test_the_largest_possible_bound_passes():
    """The likelihood is at its limit, and log p(x) − log q(x) has mean zero."""
    guide = lambda y, sd: pyro.sample("x", dist.Normal(0.0, 1.0))  # noqa: E731
    for sd in (torch.tensor(1e-3), torch.tensor(1e3), torch.tensor(1e-3)):
        history = fit(model_of_known_mean, guide, torch.zeros(50), sd, num_steps=3, progress=False)
        assert history.losses[0] == pytest.approx(50 * math.log(float(sd) * math.sqrt(2.0 * math.pi)), rel=1e-4)


def test_limits_that_depend_on_draws_are_not_applied():
    def model(y):
        log_sd = pyro.sample("log_sd", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, log_sd.exp()), obs=y)

    guide = lambda y: pyro.sample("log_sd", dist.Normal(-3.0, 2.0))  # noqa: E731
    assert len(fit(model, guide, torch.zeros(50), num_steps=20, progress=False).losses) == 20


@pytest.mark.parametrize("loss", [Trace_ELBO, StructuredELBO])
def test_sites_of_any_precision_give_possible_bounds(loss, float64):
    """Data a thousand times the scale of the prior drive the precisions of the sites to their largest values."""
    t, y = torch.linspace(0.0, 1.0, 20)[:, None], 1000.0 * torch.randn(20, 3)
    model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 3))
    guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 2)})
    losses = torch.tensor(fit(model, guide, t, y, loss=loss(), num_steps=15, progress=False).losses)
    assert (losses > 0.5 * 60 * math.log(2.0 * math.pi * 0.2)).all()


def test_log_densities_at_the_largest_site_precision(float64):
    """With sites of scale 1e-62 the difference log p − log q of joint draws is finite and negative."""
    model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 3))
    guide = StructuredGPGuide(model, init_scale=1e-62)
    t, y = torch.linspace(0.0, 1.0, 20)[:, None], torch.randn(20, 3)
    assert 0.0 < Trace_ELBO().loss(model, guide, t, y) < 1e6
