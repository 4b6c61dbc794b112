"""GP-VAEs with linear decoders, and the multi-output Gaussian processes that they are."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_lvgp.guides import StructuredGPGuide
from pyro_lvgp.kernels import Matern
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import GPVAE

N, M, D, B = 6, 3, 3, 3
NOISE = 0.3
LOADINGS = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)  # orthogonal columns
DRAWS = 20_000


class Exact(NamedTuple):
    """A multi-output Gaussian process given the data of one series, at their inputs and then at new ones."""

    log_evidence: Tensor
    f_mean: Tensor  # [Q N]
    f_covariance: Tensor  # [Q N, Q N]
    mean: Tensor  # of outputs, [N, D]
    function_covariance: Tensor  # [D N, D N]


def exact(model, x, y, x_new=None):
    """The Gaussian process y_nd = Σ_q w_dq f_q(x_n) + b_d + noise, whose kernel is Σ_q w_q w_qᵀ ⊗ k_q."""
    x_all = x if x_new is None else torch.cat([x, x_new])
    K = torch.block_diag(*model.kernel(x_all))
    A = torch.kron(model.decoder.weight, torch.eye(len(x_all)))  # [D N, Q N]
    bias = model.decoder.bias.repeat_interleave(len(x_all))
    values = torch.full((D, len(x_all)), torch.nan)
    values[:, : len(x)] = y.mT
    values = values.flatten()
    seen = ~torch.isnan(values)
    total = A[seen] @ K @ A[seen].mT + model.likelihood.variance * torch.eye(int(seen.sum()))
    gain = K @ A[seen].mT @ torch.linalg.inv(total)
    f_mean, f_covariance = gain @ (values - bias)[seen], K - gain @ A[seen] @ K
    return Exact(
        MultivariateNormal(bias[seen], total).log_prob(values[seen]),
        f_mean,
        f_covariance,
        (A @ f_mean + bias).unflatten(0, (D, -1)).mT,
        A @ f_covariance @ A.mT,
    )


def exact_variance(model, found):
    """Of outputs [N, D], noise included."""
    return found.function_covariance.diagonal().unflatten(0, (D, -1)).mT + model.likelihood.variance


def make_linear(num_latents, *series, **options):
    """One latent and holes in the data, or two with orthogonal loadings and whole rows only: the likelihood factorises."""
    variance, lengthscale = torch.tensor([1.2, 0.8])[:num_latents], torch.tensor([[0.3], [0.6]])[:num_latents]
    kernel = Matern(1, variance=variance, lengthscale=lengthscale, batch_shape=(num_latents,))
    model = GPVAE(kernel, nn.Linear(num_latents, D), Gaussian(NOISE), **options)
    model.decoder.weight, model.decoder.bias = LOADINGS[:, :num_latents].clone(), torch.tensor([0.5, 0.0, -0.5])
    x = torch.rand(*series, N, 1).sort(-2).values
    y = model(x).detach()
    y[..., 1, :] = torch.nan
    if num_latents == 1:
        y[..., 0, 1:] = torch.nan
        y[..., 3, 0] = torch.nan
    return model, x, y


def exact_sites(model, y):
    """Location and scale [*, N, Q] of the likelihood as a function of each latent."""
    W, seen = model.decoder.weight, (~torch.isnan(y)).to(y)
    norm = seen @ W.square()
    told = norm > 0.0
    loc = torch.where(told, ((y - model.decoder.bias).nan_to_num() * seen) @ W / norm, 0.0)
    return loc, torch.where(told, (model.likelihood.variance / norm).sqrt(), 1.0)


def make_exact(num_latents, *series):
    """With a guide whose own sites are the likelihood's."""
    model, x, y = make_linear(num_latents, *series)
    guide = StructuredGPGuide(model)
    guide(x, y)
    loc, scale = (part.mT.detach().reshape(guide.locs.f.shape) for part in exact_sites(model, y))
    guide.locs.f, guide.scales.f = loc, scale
    return model, guide, x, y


def one_by_one(model, x, y, x_new=None):
    if y.dim() == 2:
        return [exact(model, x, y, x_new)]
    new = [None] * B if x_new is None else x_new if x_new.dim() == 3 else [x_new] * B
    return [exact(model, *row) for row in zip(x, y, new, strict=True)]


one_and_several = pytest.mark.parametrize("series", [(), (B,)], ids=["one series", "several"])


def assert_predicts(found, model, exactly, rows):
    """Means and variances of outputs, within 4.5 standard errors."""
    lay_out = (lambda part: part) if found.mean.dim() == 3 else (lambda part: part[None])
    for mean, variance, expected in zip(lay_out(found.mean), lay_out(found.variance), exactly, strict=True):
        expected_variance = exact_variance(model, expected)[rows]
        of_function = expected_variance - model.likelihood.variance
        assert mean.shape == expected.mean[rows].shape
        assert ((mean - expected.mean[rows]).abs() < 4.5 * (of_function / DRAWS).sqrt()).all()
        assert ((variance - expected_variance).abs() < 4.5 * of_function * (2.0 / DRAWS) ** 0.5).all()
