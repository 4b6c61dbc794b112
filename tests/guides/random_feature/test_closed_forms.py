"""Updates in closed form."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_lvgp import conjugate
from pyro_lvgp.infer import BlockCoordinateVI
from tests.guides.random_feature._models import traces_of
from tests.helpers.random_features import make_pair

pytestmark = pytest.mark.usefixtures("float64")


def _kernel_bound(model, guide):
    """What α, v and assignments contribute to the bound, in closed form."""
    alpha = dist.Gamma(guide.alpha.shape, guide.alpha.rate)
    v = dist.Beta(guide.v.a, guide.v.b)
    log_alpha = torch.digamma(alpha.concentration) - alpha.rate.log()
    log_left = torch.digamma(guide.v.b) - torch.digamma(guide.v.a + guide.v.b)
    shape, rate = model.concentration
    prior_alpha = shape * rate.log() - torch.lgamma(shape) + (shape - 1.0) * log_alpha - rate * alpha.mean
    prior_v = (log_alpha + (alpha.mean - 1.0) * log_left).sum()
    mixture = model.spectral_points(conjugate.stick_log_weights(guide.v.a, guide.v.b))
    log_pi = conjugate.stick_log_weights(guide.v.a, guide.v.b)
    phi = guide.assignments()
    points = (phi * (log_pi - phi.log())).sum()
    if guide.frequencies == "gaussian":
        gaussian = dist.Normal(guide.omega.loc[:, None], guide.omega.scale[:, None])
        points = points - (phi * kl_divergence(gaussian, mixture._components()).sum(-1)).sum()
    return prior_alpha + prior_v + points + alpha.entropy() + v.entropy().sum()


@pytest.mark.parametrize("frequencies", ["mixture", "gaussian"])
def test_closed_forms_never_lower_the_bound_and_settle_at_its_maximum(Y, frequencies):
    model, guide = make_pair(Y, frequencies=frequencies)
    blocks = {block.name: block for block in guide.blocks()}
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
        bounds = [_kernel_bound(model, guide)]
        for _ in range(200):
            for name, (first, second) in {"sticks": ("v.a", "v.b"), "concentration": ("alpha.shape", "alpha.rate")}.items():
                values = blocks[name].update(Y)
                for path in (first, second):
                    site, parameter = path.split(".")
                    setattr(getattr(guide, site), parameter, values[f"guide.{path}"])
                bounds.append(_kernel_bound(model, guide))
    assert (torch.stack(bounds).diff() >= -1e-10).all()
    slopes = torch.autograd.grad(_kernel_bound(model, guide), [*guide.v.parameters(), *guide.alpha.parameters()])
    for slope in slopes:
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0.0, atol=1e-5)


def test_closed_forms_pass_the_check_of_the_bound_that_is_climbed(Y):
    model, guide = make_pair(Y, frequencies="mixture")
    vi = BlockCoordinateVI(model, guide, guide.blocks(), check_updates=100)
    for _ in range(2):  # from the start, and from values of each block's own
        vi.step(Y)


def test_bound_holds_the_kernel_bound_in_expectation(Y):
    """Analytic divergences in TraceMeanField_ELBO add up to the closed form, but for X and the data."""
    model, guide = make_pair(Y)
    with pyro.plate("draws", 1000, dim=-2), torch.no_grad():
        q, p = traces_of(model, guide, Y)
    terms = -sum(kl_divergence(q[name]["fn"], p[name]["fn"]) for name in ("alpha", "v", "omega")).squeeze()
    assert terms.shape == (1000,)
    assert abs(terms.mean() - _kernel_bound(model, guide)) < 4.0 * terms.std() / len(terms) ** 0.5
