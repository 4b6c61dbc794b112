"""The dense GP-VAE in plain PyTorch: one bound with closed-form sites, written out, without Pyro."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import softplus

_JITTER = 1e-8


class PlainGPVAE(nn.Module):
    r"""Bound of a GP-VAE with Matérn-3⁄2 processes, Gaussian noise, and a Gaussian site for each point and latent.

    .. math::

        L = E_q \log p(y | f) - E_q \log t(f) + \log Z, \quad q(f_q) \propto N(0, K_q) \prod_n N(f_{nq}; m_{nq}, s_{nq}^2),
        \quad Z_q = N(m_q; 0, K_q + S_q)

    :param encoder: maps rows to m and s.
    :param decoder: maps latents to means of outputs.
    :param lengthscale: initial lengthscale of the processes.
    :param latent_dim: number Q of processes.
    :param variance: initial noise variance.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, *, lengthscale: float, latent_dim: int, variance: float):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        ones = torch.ones(latent_dim, dtype=torch.float64)
        self.lengthscale = nn.Parameter(_inverse_softplus(lengthscale * ones))
        self.process_variance = nn.Parameter(_inverse_softplus(ones))
        self.noise = nn.Parameter(_inverse_softplus(variance * ones[0]))

    def forward(self, t: Float[Tensor, "N 1"], y: Float[Tensor, "N D"]) -> Float[Tensor, ""]:
        """Estimate the bound by one draw of the marginals of the latents."""
        loc, scale = (x.mT for x in self.encoder(y))  # [Q, N]
        distance = math.sqrt(3.0) * (t - t.mT).abs() / softplus(self.lengthscale)[:, None, None]
        K = softplus(self.process_variance)[:, None, None] * (1.0 + distance) * (-distance).exp()
        L = torch.linalg.cholesky(K + torch.diag_embed(scale.square() + _JITTER))
        A = torch.linalg.solve_triangular(L, K, upper=False)
        whitened = torch.linalg.solve_triangular(L, loc[..., None], upper=False)
        mean = (A.mT @ whitened).squeeze(-1)
        variance = (K.diagonal(dim1=-2, dim2=-1) - A.square().sum(-2)).clamp_min(1e-12)
        log_Z = -0.5 * (whitened.square().sum() + 2.0 * L.diagonal(dim1=-2, dim2=-1).log().sum() + loc.numel() * _LOG_2PI)
        sites = Normal(loc, scale).log_prob(mean).sum() - 0.5 * (variance / scale.square()).sum()
        f = mean + variance.sqrt() * torch.randn_like(mean)
        observed = ~torch.isnan(y)
        entries = Normal(self.decoder(f.mT), softplus(self.noise).sqrt()).log_prob(torch.nan_to_num(y))
        return torch.where(observed, entries, 0.0).sum() - sites + log_Z


_LOG_2PI = math.log(2.0 * math.pi)


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))
