"""Posterior of a process: missing rows, extrapolation, prediction and precision."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.networks import FactorNet
from pyro_lvgp.ops import gaussian_sites
from tests.helpers.structured import B, D, N, Q, make, make_data, make_model, posterior_of

pytestmark = pytest.mark.usefixtures("float64")


def test_rows_with_nothing_observed_add_nothing_to_the_posterior():
    _, guide, x, y = make()
    y[0] = torch.nan
    told = ~torch.isnan(y).all(-1)
    assert told.tolist() == [False, False, True, True, True]
    q, without = posterior_of(guide, x, y), posterior_of(guide, x[told], y[told])
    between = without.at(x[~told][None])
    torch.testing.assert_close(q.mean, torch.cat([between.mean, without.mean], -1))
    torch.testing.assert_close(q.variance, torch.cat([between.variance, without.variance], -1))


def test_the_prior_far_from_data():
    model, guide, x, y = make()
    q = posterior_of(guide, torch.cat([x[:2] - 100.0, x]), torch.cat([torch.full((2, D), torch.nan), y]))
    prior_variance = model.kernel.variance[:, None]
    torch.testing.assert_close(q.mean[:, :2], torch.zeros(Q, 2))
    torch.testing.assert_close(q.variance[:, :2], prior_variance.expand(Q, 2))
    assert (q.mean[:, 2:].abs() > 1e-6).all()
    assert (q.variance[:, 2:] < 0.99 * prior_variance).all()


@pytest.mark.parametrize("series", [(), (B,)], ids=["one", "several"])
def test_prediction_is_the_guide_on_old_and_new_inputs_together(series):
    model, guide, x, y = make(*series)
    x_new = torch.rand(*series, 3, 1)
    x_both, y_both = torch.cat([x, x_new], -2), torch.cat([y, torch.full((*series, 3, D), torch.nan)], -2)
    slow = posterior_of(guide, x_both, y_both)
    X_new = x_new[:, None, None] if series else x_new[None]
    q = posterior_of(guide, x, y)
    marginals, joint = q.at(X_new), q.at(X_new, joint=True)
    torch.testing.assert_close(marginals.mean, slow.mean[..., N:])
    torch.testing.assert_close(marginals.variance, slow.variance[..., N:])
    K = model.kernel(x_both[:, None, None] if series else x_both)
    covariance = gaussian_sites.predictive_covariance(slow.posterior, K, K)[..., N:, N:]
    torch.testing.assert_close(joint.covariance_matrix, covariance, rtol=1e-6, atol=1e-6)


def test_sharp_sites_in_float32_do_not_lift_the_bound():
    """Site scales far below rounding of the prior: KL and bound lose digits, but not their signs."""
    model = make_model().float()
    guide = StructuredGPGuide(model)
    x, y = torch.linspace(0.0, 1.0, 50, dtype=torch.float32)[:, None], torch.randn(50, D, dtype=torch.float32)
    guide(x, y)
    guide.locs.f = model.prior(x).sample()
    for scale in (1e-2, 1e-3, 1e-4, 1e-6):
        guide.scales.f = torch.full_like(guide.locs.f, scale)
        q = posterior_of(guide, x, y)
        assert (kl_divergence(q, model.prior(x).base_dist) > 10.0).all()
        # Precisions of sites are at most 1e11 times that of the prior.
        assert (q.variance <= 1.001 * torch.maximum(torch.tensor(scale**2), 1e-11 * model.prior(x).variance)).all()


def test_a_normal_prior_is_multiplied_in_closed_form():
    """In plates, with and without latent dimensions of its own; rows with nothing observed keep the prior."""

    def model(y):
        with pyro.plate("series", B, dim=-2), pyro.plate("points", N, dim=-1):
            w = pyro.sample("w", dist.Normal(0.3 + torch.zeros(2), 0.8).to_event(1))
            z = pyro.sample("z", dist.Normal(-1.0, 2.0))
            pyro.sample("y", dist.Normal(w.sum(-1) + z, 1.0).mask(~torch.isnan(y[..., 0])), obs=y[..., 0].nan_to_num())

    y = make_data(B)[1]
    guide = StructuredGPGuide(model, encoders={"w": FactorNet(D, 2, [2]), "z": FactorNet(D, 1, [2])})
    guide(y)
    told = ~torch.isnan(y).all(-1)
    for name, mean, scale, latents in (("w", 0.3, 0.8, (2,)), ("z", -1.0, 2.0, ())):
        q = posterior_of(guide, y, site=name)
        loc, site_scale = (part if latents else part[..., 0] for part in getattr(guide.encoders, name)(y))
        assert q.mean.shape == (B, N, *latents)
        for n, row in product(range(B), range(N)):
            if told[n, row]:
                gain = scale**2 / (scale**2 + site_scale[n, row] ** 2)
                torch.testing.assert_close(q.mean[n, row], mean + gain * (loc[n, row] - mean))
                torch.testing.assert_close(q.variance[n, row], (1.0 - gain) * scale**2)
            else:
                torch.testing.assert_close(q.mean[n, row], torch.full(latents, mean))
                torch.testing.assert_close(q.variance[n, row], torch.full(latents, scale**2))
    assert StructuredELBO().differentiable_loss(model, guide, y).isfinite()
