r"""Random Fourier features, and spectral mixture kernels: pure tensor functions.

By Bochner's theorem a stationary kernel with k(x, x) = 1 is the Fourier transform of a density of frequencies,
:math:`k(x, x') = E_{\omega}[\cos 2\pi \omega^T (x - x')]`.  Inner products of features at random frequencies estimate the
kernel without bias.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp.ops.covariance import exact_squared_distance

__all__ = ["mixture_kernel", "random_features", "spectral_density"]


@names_types
def random_features(X: Float[Tensor, "*#batch N Q"], omega: Float[Tensor, "*#batch F Q"]) -> Float[Tensor, "*batch N L"]:
    r"""Compute random Fourier features of inputs.

    .. math:: \varphi(x) = \sqrt{2/L}\,[\cos 2\pi x^T\omega_1, \dots, \sin 2\pi x^T\omega_1, \dots], \qquad L = 2F

    :math:`\varphi(x)^T \varphi(x) = 1`, and :math:`E\,\varphi(x)^T \varphi(x') = k(x, x')` if the frequencies are draws of the
    spectral density of k.

    :param X: inputs.
    :param omega: frequencies, in cycles per unit of X.

    Source: Rahimi and Recht (2007), "Random features for large-scale kernel machines"; eq. 4 of the SRFLVM paper.

    >>> random_features(torch.tensor([[0.0], [0.5]]), torch.tensor([[1.0]]))
    tensor([[ 1.0000e+00,  0.0000e+00],
            [-1.0000e+00, -8.7423e-08]])
    """
    angle = 2.0 * math.pi * (X @ omega.mT)
    return torch.cat([angle.cos(), angle.sin()], -1) / omega.shape[-2] ** 0.5


@names_types
def mixture_kernel(
    X: Float[Tensor, "*#batch N Q"],
    X2: Float[Tensor, "*#batch M Q"],
    weights: Float[Tensor, "*#batch C"],
    locs: Float[Tensor, "*#batch C Q"],
    scales: Float[Tensor, "*#batch C Q"],
) -> Float[Tensor, "*batch N M"]:
    r"""Compute the spectral mixture kernel, whose frequencies have a mixture of diagonal Gaussians.

    With :math:`\tau = x - x'`,

    .. math:: k(x, x') = \sum_c w_c \cos(2\pi \mu_c^T \tau) \exp\big(-2\pi^2 \textstyle\sum_q \sigma_{cq}^2 \tau_q^2\big) .

    One component at zero is an RBF kernel with lengthscales :math:`1 / (2\pi\sigma)`.

    :param X: inputs.
    :param X2: other inputs.
    :param weights: w, which sum to one.
    :param locs: means μ.
    :param scales: standard deviations σ.

    Source: Wilson and Adams (2013), "Gaussian process kernels for pattern discovery and extrapolation", eq. 12.

    >>> at, one = torch.zeros(1, 1), torch.ones(1)
    >>> mixture_kernel(at, at + 0.5, one, torch.ones(1, 1), torch.zeros(1, 1))
    tensor([[-1.]])
    """
    waves, waves2 = _waves(X, locs), _waves(X2, locs)
    kernel = torch.zeros((), dtype=X.dtype, device=X.device)
    for c in range(locs.shape[-2]):  # a tensor of N × M × C numbers would be limited by memory bandwidth
        scale = scales[..., c : c + 1, :]
        oscillation = waves[..., c, :, :] @ waves2[..., c, :, :].mT
        decay = (-2.0 * math.pi**2 * exact_squared_distance(X * scale, X2 * scale)).exp()
        kernel = kernel + weights[..., c, None, None] * decay * oscillation
    return kernel


@names_types
def spectral_density(
    omega: Float[Tensor, "*#batch K Q"],
    weights: Float[Tensor, "*#batch C"],
    locs: Float[Tensor, "*#batch C Q"],
    scales: Float[Tensor, "*#batch C Q"],
) -> Float[Tensor, "*batch K"]:
    r"""Compute the spectral density of :func:`mixture_kernel`, :math:`\tfrac12 (p(\omega) + p(-\omega))`.

    The density is symmetric, since a real kernel is the same for ω and −ω.

    :param omega: frequencies.
    :param weights: w, which sum to one.
    :param locs: means μ of the components.
    :param scales: standard deviations σ of the components.

    >>> spectral_density(torch.zeros(1, 1), torch.ones(1), torch.zeros(1, 1), torch.ones(1, 1))
    tensor([0.3989])
    """
    both_sides = torch.stack([omega, -omega])
    components = torch.distributions.Normal(locs.unsqueeze(-3), scales.unsqueeze(-3))
    log_density = components.log_prob(both_sides.unsqueeze(-2)).sum(-1)
    return (log_density.exp() * weights.unsqueeze(-2)).sum(-1).mean(0)


def _waves(X: Tensor, locs: Tensor) -> Float[Tensor, "*batch C N 2"]:
    """Cosine and sine of 2π μᵀx for each component, whose inner products are cosines of 2π μᵀ(x − x')."""
    angle = 2.0 * math.pi * (locs @ X.mT)
    return torch.stack([angle.cos(), angle.sin()], -1)
