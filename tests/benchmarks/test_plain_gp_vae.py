"""The GP-VAE in plain PyTorch has the bound of ours."""

import pyro
import pytest
import torch

pytest.importorskip("gpytorch")

from benchmarks.peers.plain_gp_vae import PlainGPVAE
from benchmarks.tasks.speed_gp_vae import LATENT_DIM, LENGTHSCALE, VARIANCE, networks, series
from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE

NUM_DRAWS, NUM_MEANS = 400, 20


@torch.no_grad()
def test_both_estimate_one_bound():
    t, y, complete = series(30, seed=0)
    assert y.isnan().any()
    assert not complete.isnan().any()
    encoder, decoder = networks(0)
    plain = PlainGPVAE(encoder, decoder, lengthscale=LENGTHSCALE, latent_dim=LATENT_DIM, variance=VARIANCE)
    model = GPVAE(Matern(1, 1.5, lengthscale=LENGTHSCALE, batch_shape=(LATENT_DIM,)), decoder, Gaussian(VARIANCE)).double()
    guide = StructuredGPGuide(model, encoders={"f": encoder})
    guide(t, y)
    pyro.set_rng_seed(0)
    bound = StructuredELBO(num_particles=NUM_DRAWS // NUM_MEANS)
    ours = torch.tensor([-bound.loss(model, guide, t, y) for _ in range(NUM_MEANS)])
    theirs = torch.stack([plain(t, y) for _ in range(NUM_DRAWS)]).unflatten(0, (NUM_MEANS, -1)).mean(1)
    error = ((ours.var() + theirs.var()) / NUM_MEANS).sqrt()
    assert (ours.mean() - theirs.mean()).abs() < 4.0 * error
