"""Latents that are independent from point to point, beside the processes."""

from typing import NamedTuple

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.infer import StructuredELBO
from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE
from pyro_lvgp.networks import MLP, FactorNet
from tests.models.gp_vae._models import (
    DRAWS,
    LOADINGS,
    NOISE,
    D,
    M,
    N,
    assert_predicts,
    exact_sites,
    make_linear,
    one_and_several,
    one_by_one,
)

pytestmark = pytest.mark.usefixtures("float64")


def make_with_white(*series):
    """One smooth latent and one that is independent from point to point, with orthogonal loadings and exact sites."""
    smooth, x, y = make_linear(1, *series)
    pyro.clear_param_store()  # of the decoder that is replaced
    y = torch.where(torch.isnan(y).all(-1, keepdim=True), torch.nan, torch.randn(y.shape))
    model = GPVAE(smooth.kernel, nn.Linear(2, D), Gaussian(NOISE), independent_dim=1)
    model.decoder.weight, model.decoder.bias = LOADINGS.clone(), torch.tensor([0.5, 0.0, -0.5])

    class Column(nn.Module):
        def __init__(self, column):
            super().__init__()
            self.column = column

        def forward(self, y):
            return tuple(part[..., self.column, None] for part in exact_sites(model, y))

    guide = StructuredGPGuide(model, encoders={"f": Column(0), "w": Column(1)})
    guide(x, y)
    return model, guide, x, y


class _Both(NamedTuple):
    """The same model with the white latent as a process."""

    kernel: object
    decoder: nn.Module
    likelihood: Gaussian


def as_two_processes(model):
    def kernel(x):
        return torch.cat([model.kernel(x), torch.eye(len(x))[None]])

    return _Both(kernel, model.decoder, model.likelihood)


@one_and_several
def test_latents_independent_from_point_to_point(series):
    """``w`` is a process with a white kernel: evidence, posterior, and predictions at new inputs and at the data."""
    model, guide, x, y = make_with_white(*series)
    x_new = torch.rand(*series, M, 1)
    exactly = one_by_one(as_two_processes(model), x, y, x_new)
    evidence = sum(found.log_evidence for found in exactly)
    elbo = StructuredELBO(num_particles=500, max_plate_nesting=2)
    losses = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(16)])
    error = losses.std() / 4.0
    assert error < 0.1
    assert abs(losses.mean() + evidence) < 6.0 * error
    w = poutine.trace(guide).get_trace(x, y).nodes["w"]["fn"].base_dist
    for mean, variance, found in zip(
        *((part if series else part[None]) for part in (w.mean, w.variance)), exactly, strict=True
    ):
        torch.testing.assert_close(mean[:, 0], found.f_mean[N + M :][:N])
        torch.testing.assert_close(variance[:, 0], found.f_covariance.diagonal()[N + M :][:N])
    for at, rows in ((None, slice(0, N)), (x_new, slice(N, N + M))):
        assert_predicts(model.predict(guide, x, y, at, num_samples=DRAWS), model, exactly, rows)


def test_latents_without_an_encoder_know_no_other_series():
    model = GPVAE(RBF(1, batch_shape=(2,)), MLP(3, D), independent_dim=1)
    guide, x, y = StructuredGPGuide(model, encoders={"f": FactorNet(D, 2)}), torch.rand(N, 1), torch.randn(N, D)
    guide(x, y)
    with pytest.raises(ValueError, match="expected the data of the first call, which the parameters of 'w' are for"):
        model.predict(guide, x[1:], y[1:])


def test_a_negative_number_of_latents():
    with pytest.raises(ValueError, match="expected independent_dim of 0 or more, got -1"):
        GPVAE(RBF(1), MLP(1, D), independent_dim=-1)
