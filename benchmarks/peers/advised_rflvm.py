"""Advised RFLVM: random features of a spectral mixture kernel, with weights integrated out, fitted by Adam."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

_LEAST_NOISE = 1e-4  # lower limit of GPyTorch's likelihood, which the authors use


class AdvisedRFLVM(nn.Module):
    r"""Columns of Y are draws of a Gaussian process of latents, whose kernel has a mixture of Gaussians as spectral density.

    .. math::

        \phi_{cs}(x) = \sqrt{\pi_c / S}\, (\cos 2\pi \omega_{cs}^T x, \sin 2\pi \omega_{cs}^T x), \quad
        \omega_{cs} = \mu_c + \sigma_c \epsilon_{cs}

    .. math::

        L = E_{q(X) p(\epsilon)} \sum_d \log N(y_d; 0, \Phi \Phi^T + \sigma^2 I) - \sum_n KL(q(x_n) \| N(0, I)), \quad
        q(x_n) = N(m_n, diag\, s_n^2)

    Each evaluation draws X and all frequencies anew.  Initial values are those of the authors: components of mean 0 and
    standard deviation softplus(1), random weights, random standard deviations of latents, and latent means at principal
    components, here of unit variance.

    :param Y: data of mean 0.
    :param latent_dim: number Q of latents.
    :param num_components: number of components c.
    :param num_draws: number S of frequencies of a component.

    Source: Li, Lin, Yin and Zhang (2024), "Preventing model collapse in Gaussian process latent variable models"; settings of
    github.com/zhidilin/advisedGPLVM.

    >>> model = AdvisedRFLVM(torch.randn(20, 4, dtype=torch.float64))
    >>> model.fit(2).latents().shape
    torch.Size([20, 2])
    """

    def __init__(self, Y: Float[Tensor, "N D"], latent_dim: int = 2, *, num_components: int = 2, num_draws: int = 25):
        super().__init__()
        N, self._num_columns = Y.shape
        # Only Y Yᵀ matters, so that N columns are enough.
        self._Y = torch.linalg.qr(Y.mT).R.mT if self._num_columns > N else Y
        self._num_draws = num_draws
        U = torch.linalg.svd(Y, full_matrices=False).U[:, :latent_dim]
        self.loc = nn.Parameter(U * N**0.5)
        self.raw_scale = nn.Parameter(torch.randn_like(U))
        self.raw_weight = nn.Parameter(torch.randn(num_components, dtype=U.dtype))
        self.mean = nn.Parameter(U.new_zeros(num_components, latent_dim))
        self.raw_deviation = nn.Parameter(U.new_ones(num_components, latent_dim))
        self.raw_noise = nn.Parameter(U.new_zeros(()))

    @property
    def noise(self) -> Float[Tensor, ""]:
        """Variance of the noise."""
        return softplus(self.raw_noise) + _LEAST_NOISE

    def latents(self) -> Float[Tensor, "N Q"]:
        """Means of the latents."""
        return self.loc.detach()

    def features(self, X: Float[Tensor, "N Q"]) -> Float[Tensor, "N L"]:
        """Features at latents, for new frequencies."""
        C, Q = self.mean.shape
        epsilon = torch.randn(C, self._num_draws, Q, dtype=X.dtype)
        frequencies = self.mean[:, None] + softplus(self.raw_deviation)[:, None] * epsilon
        amplitude = (softplus(self.raw_weight) / self._num_draws).sqrt().repeat_interleave(self._num_draws)
        angle = 2.0 * math.pi * X @ frequencies.flatten(0, 1).mT
        return torch.cat([amplitude * angle.cos(), amplitude * angle.sin()], 1)

    def log_density(self, features: Float[Tensor, "N L"]) -> Float[Tensor, ""]:
        """Log density of all columns given features, by the Woodbury identity."""
        N, L = features.shape
        eye = torch.eye(L, dtype=features.dtype)
        factor = torch.linalg.cholesky(features.mT @ features + self.noise * eye)
        explained = torch.linalg.solve_triangular(factor, features.mT @ self._Y, upper=False).square().sum()
        log_det = 2.0 * factor.diagonal().log().sum() + (N - L) * self.noise.log()
        squares = (self._Y.square().sum() - explained) / self.noise
        return -0.5 * (squares + self._num_columns * (log_det + N * math.log(2.0 * math.pi)))

    def kl(self) -> Float[Tensor, ""]:
        """Kullback–Leibler divergence of the latents from their prior."""
        scale = softplus(self.raw_scale)
        return 0.5 * (self.loc.square() + scale.square() - 1.0 - 2.0 * scale.log()).sum()

    def forward(self) -> Float[Tensor, ""]:
        """Estimate the bound by one draw."""
        X = self.loc + softplus(self.raw_scale) * torch.randn_like(self.loc)
        return self.log_density(self.features(X)) - self.kl()

    def fit(self, num_steps: int, *, learning_rate: float = 0.01) -> "AdvisedRFLVM":
        """Take steps of Adam on all rows."""
        optimizer = torch.optim.Adam(self.parameters(), lr=learning_rate, fused=True)
        for _ in range(num_steps):
            optimizer.zero_grad()
            (-self() / self._Y.numel()).backward()
            optimizer.step()
        return self

    @torch.no_grad()
    def negative_bound(self, num_evaluations: int = 30) -> float:
        """Minus the bound per row, averaged over draws."""
        return -torch.stack([self() for _ in range(num_evaluations)]).mean().item() / len(self._Y)
