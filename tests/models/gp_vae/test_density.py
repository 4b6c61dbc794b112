"""Sites of the model and their joint density."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch.distributions import MultivariateNormal

from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP
from tests.models.gp_vae._models import NOISE, B, D, N, make_linear, one_and_several

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("white", [0, 2])
@pytest.mark.parametrize(("x_shape", "series"), [((), ()), ((B,), (B,)), ((), (B,))], ids=["one", "several", "shared inputs"])
def test_sites_and_density(x_shape, series, white):
    model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2 + white, D, [4]), Gaussian(0.4), independent_dim=white)
    x, y = torch.linspace(0.0, 1.0, N)[:, None].expand(*x_shape, N, 1), torch.randn(*series, N, D)
    y[..., 1, :], y[..., 2, 0] = torch.nan, torch.nan
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    f = trace.nodes["f"]["value"]
    assert f.shape == ((B, 1, 2, N) if series else (2, N))
    latents = (f.squeeze(1) if series else f).mT
    expected = MultivariateNormal(torch.zeros(N), model.kernel(x[0] if x_shape else x) + 1e-8 * torch.eye(N)).log_prob(f).sum()
    if white:
        w = trace.nodes["w"]["value"]
        assert w.shape == (*series, N, white)
        expected = expected + dist.Normal(0.0, 1.0).log_prob(w).sum()
        latents = torch.cat([latents, w], -1)
    log_prob = dist.Normal(model.decoder(latents), 0.4**0.5).log_prob(y.nan_to_num())
    torch.testing.assert_close(trace.log_prob_sum(), expected + log_prob[~torch.isnan(y)].sum(), rtol=1e-6, atol=1e-6)
    plates = {name: {frame.name for frame in trace.nodes[name]["cond_indep_stack"]} for name in ("f", "y", *["w"][:white])}
    outer = {"series"} if series else set()
    assert plates.pop("f") == outer
    assert all(names == outer | {"points"} for names in plates.values())


@one_and_several
def test_data_from_the_prior(series):
    """Means of zero and the covariance of the multi-output process."""
    model, x, _ = make_linear(2, *series)
    model.decoder.bias = torch.zeros(D)
    draws = Predictive(model, num_samples=4000, parallel=True)(x)["y"].reshape(4000, *series, N, D)
    A = torch.kron(model.decoder.weight, torch.eye(N))
    for drawn, inputs in zip(draws.unbind(1) if series else [draws], x if series else [x], strict=True):
        flat = drawn.mT.flatten(1)
        covariance = A @ torch.block_diag(*model.kernel(inputs)) @ A.mT + NOISE * torch.eye(N * D)
        variance = covariance.diagonal()
        error = ((variance[:, None] * variance + covariance.square()) / 4000).sqrt()
        assert ((flat.mT @ flat / 4000 - covariance).abs() < 5.0 * error).all()
        assert (flat.mean(0).abs() < 4.5 * (variance / 4000).sqrt()).all()
