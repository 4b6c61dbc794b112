"""Small variational autoencoder, whose encodings are latents to compare with."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class VAE(nn.Module):
    """Gaussian encoder and decoder with one hidden layer each, and one noise variance, which is learned.

    :param data_dim: number of columns D.
    :param latent_dim: number of latents Q.
    :param hidden: width of the hidden layers.
    """

    def __init__(self, data_dim: int, latent_dim: int, *, hidden: int = 128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(data_dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent_dim))
        self.decoder = nn.Sequential(nn.Linear(latent_dim, hidden), nn.ReLU(), nn.Linear(hidden, data_dim))
        self.log_variance = nn.Parameter(torch.zeros(()))

    def encode(self, Y: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B Q"], Float[Tensor, "B Q"]]:
        """Means of the latents, and logarithms of their standard deviations."""
        mean, log_stddev = self.encoder(Y).chunk(2, -1)
        return mean, log_stddev

    def forward(self, Y: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
        """Minus the bound on the rows, per row, from one draw of the latents."""
        mean, log_stddev = self.encode(Y)
        X = mean + log_stddev.exp() * torch.randn_like(mean)
        squares = (Y - self.decoder(X)).square() / self.log_variance.exp()
        nll = 0.5 * (squares + self.log_variance + math.log(2.0 * math.pi)).sum(-1)
        kl = (0.5 * (mean.square() + (2.0 * log_stddev).exp() - 1.0) - log_stddev).sum(-1)
        return (nll + kl).mean()


def fit_latents(
    Y: Float[Tensor, "N D"], *, latent_dim: int, num_steps: int, batch_size: int, learning_rate: float = 1e-3
) -> Float[Tensor, "N Q"]:
    """Train a VAE by Adam on random mini-batches, and encode the data.

    :param Y: standardised data.
    :param num_steps: steps of Adam.
    :param batch_size: rows of a step; all of them if there are fewer.
    """
    model = VAE(Y.shape[1], latent_dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(Y[torch.randperm(len(Y))[:batch_size]]).backward()
        optimizer.step()
    with torch.no_grad():
        return model.encode(Y)[0]
