"""Mean of every estimator of the bound and of its gradient, against quadrature."""

import math
from itertools import product

import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_lvgp.distributions import GaussianProcess, gaussian_process
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.networks import FactorNet
from pyro_lvgp.ops import gaussian_sites
from tests.helpers.structured import B, D, Q, make, make_data, make_model, posterior_of
from tests.infer.elbo.structured._bounds import (
    ESTIMATORS,
    assert_mean_of_runs,
    condition_told,
    every_estimator,
    hermite,
    loss_and_slopes,
    many_particles,
    particles,
)

pytestmark = pytest.mark.usefixtures("float64")


def quadrature(model, guide, x, y):
    """The bound of one series, the expectation over each f_n by quadrature."""
    loc, scale = (part.mT for part in guide.encoders.f(y))
    mean, variance, kl = condition_told(model.kernel(x), 0.0, loc, scale, (~torch.isnan(y)).any(-1))
    nodes, weights = hermite(25)
    grid = torch.cartesian_prod(*[nodes] * Q)[:, None]
    log_prob = model.likelihood(model.decoder(mean.mT + variance.sqrt().mT * grid)).log_prob(torch.nan_to_num(y))
    expected = torch.cartesian_prod(*[weights] * Q).prod(-1) @ (log_prob * ~torch.isnan(y)).sum((-1, -2))
    return expected - kl.sum()


BOUNDS = {f"{'-'.join(e.values())}-{len(series)}": (e, series) for e, series in product(ESTIMATORS, [(), (B,)])}
BOUNDS |= {"trace": ({"bound": Trace_ELBO}, (B,)), "trace mean-field": ({"bound": TraceMeanField_ELBO}, (B,))}
BOUNDS |= {f"{name}-state-space": BOUNDS[name] for name in ("semi-analytic-path-1", "trace", "trace mean-field")}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_and_gradients_have_one_mean(name, monkeypatch):
    options, series = BOUNDS[name]
    if name.endswith("state-space"):
        monkeypatch.setattr(gaussian_process, "_MIN_STATE_SPACE_POINTS", 0)
    model, guide, x, y = make(*series)
    rows = zip(x, y, strict=True) if series else [(x, y)]
    expected = sum(quadrature(model, guide, *row) for row in rows)
    num = 1500 if options.get("gradient_estimator") == "score" else 200
    assert_mean_of_runs(particles(num, 1 + len(series), **options), model, guide, (x, y), expected)


@every_estimator
@pytest.mark.parametrize("weights", [[1.0, 0.5, 2.0, 1.0], [True, False, True, True]], ids=["scaled", "masked"])
def test_series_count_as_often_as_their_scales_and_masks_say(weights, estimator):
    model, (x, y) = make_model(), make_data(B)
    w = torch.tensor(weights)[:, None]
    weighted = poutine.mask(model, mask=w) if w.dtype == torch.bool else poutine.scale(model, scale=w)
    guide = StructuredGPGuide(weighted, encoders={"f": FactorNet(D, Q, [2])})
    guide(x, y)
    expected = sum(weight * quadrature(model, guide, *row) for weight, *row in zip(w.squeeze(-1), x, y, strict=True))
    assert_mean_of_runs(many_particles(estimator), weighted, guide, (x, y), expected)


def test_a_guide_of_another_model_has_no_closed_form_but_the_right_bound():
    """A divergence from another process is estimated by draws, not taken for that from the posterior's own prior."""
    _, guide, x, y = make()
    kernel = RBF(1, variance=torch.tensor([1.2, 0.8]), lengthscale=torch.tensor([[0.3], [0.5]]), batch_shape=(Q,))
    q, p = posterior_of(guide, x, y), GaussianProcess(kernel, x)
    with pytest.raises(NotImplementedError):
        kl_divergence(q, p)
    K = q.prior.covariance_matrix
    normal = MultivariateNormal(q.mean, gaussian_sites.predictive_covariance(q.posterior, K, K))
    f = q.rsample((20_000,))
    ratios = q.log_prob(f) - p.log_prob(f)
    error = ratios.mean(0) - kl_divergence(normal, MultivariateNormal(p.mean, p.covariance_matrix))
    assert (error.abs() < 4.0 * ratios.std(0) / len(f) ** 0.5).all()


@every_estimator
def test_particles_are_averaged(estimator, fixed_noise):
    """Along whatever dimension they are drawn, each is the same here."""
    model, guide, x, y = make()
    expected = loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y)
    for nesting, vectorize in ((1, True), (3, True), (math.inf, True), (1, False)):
        options = {"num_particles": 3, "vectorize_particles": vectorize, "max_plate_nesting": nesting}
        found = loss_and_slopes(StructuredELBO(**options, **estimator), model, guide, x, y)
        torch.testing.assert_close(found, expected)


@every_estimator
def test_loss_and_its_gradients(estimator, fixed_noise):
    model, guide, x, y = make(B)
    expected = loss_and_slopes(StructuredELBO(**estimator), model, guide, x, y)
    assert StructuredELBO(**estimator).loss(model, guide, x, y) == pytest.approx(expected[0].item())
    parameters = [*model.parameters(), *guide.parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    assert StructuredELBO(**estimator).loss_and_grads(model, guide, x, y) == pytest.approx(expected[0].item())
    torch.testing.assert_close(torch.cat([parameter.grad.flatten() for parameter in parameters]), expected[1:])
