"""Decoders and likelihoods of a user's own, and counts."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO, fit
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Poisson
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet
from tests.models.gp_vae._models import B, D, M, N, make_linear, one_and_several

pytestmark = pytest.mark.usefixtures("float64")


class WithVariance(nn.Module):
    """A decoder that gives the variance of each entry too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2 * D)

    def forward(self, latents):
        function, log_variance = self.net(latents).chunk(2, -1)
        return function, log_variance.exp()


@one_and_several
def test_a_decoder_of_means_and_variances(series):
    kernel = RBF(1, batch_shape=(2,))
    model, x = GPVAE(kernel, WithVariance()), torch.rand(*series, N, 1)
    y = torch.randn(*series, N, D)
    y[..., 2, :2] = torch.nan
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2, [3])})
    trace = poutine.trace(poutine.replay(model, poutine.trace(guide).get_trace(x, y))).get_trace(x, y)
    trace.compute_log_prob()
    f = trace.nodes["f"]["value"]
    function, variance = model.decoder((f.squeeze(1) if series else f).mT)
    expected = torch.where(torch.isnan(y), 0.0, dist.Normal(function, variance.sqrt()).log_prob(y.nan_to_num())).sum(-1)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], expected)
    (part,) = model.predict(guide, x, y, num_samples=7).parts
    assert part.variance.shape == (7, *series, N, D)
    assert part.variance.std() > 0.0
    with pytest.raises(ValueError, match="expected num_samples of 1 or more, got 0"):
        model.predict(guide, x, y, num_samples=0)


def test_a_decoder_may_return_a_list():
    class Lists(WithVariance):
        def forward(self, latents):
            return list(super().forward(latents))

    decoder, x = Lists(), torch.rand(N, 1)
    pyro.set_rng_seed(0)
    y = poutine.trace(GPVAE(RBF(1, batch_shape=(2,)), decoder)).get_trace(x).nodes["y"]["fn"]
    assert y.base_dist.variance.std() > 0.0


def test_counts():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(2, D, [4]), Poisson())
    x, y = torch.rand(B, N, 1), torch.poisson(torch.full((B, N, D), 2.0))
    y[0, 1] = torch.nan
    guide = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2, [4])})
    fit(model, guide, x, y, loss=StructuredELBO(), num_steps=2, progress=False)
    found = model.predict(guide, x, y, torch.rand(M, 1), num_samples=50)
    torch.testing.assert_close(found.variance, found.mean + found.parts[0].mean.var(0, correction=0))
    assert (found.sample() % 1.0 == 0.0).all()
    with pytest.raises(ValueError, match=r"Poisson likelihood: expected counts 0, 1, …, got -1"):
        fit(model, guide, x, y - 1.0 - y.nan_to_num(), num_steps=1, progress=False)


def test_a_decoder_of_other_latents():
    model, x, y = make_linear(1)
    model.decoder = nn.Linear(2, D)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        model(x, y)
    assert "the decoder was given 1 latent dimensions, and numbers of torch.float64" in caught.value.__notes__
