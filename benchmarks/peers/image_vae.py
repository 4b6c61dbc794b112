"""Small convolutional encoder and decoder of images, and a variational autoencoder with them that may be told a condition."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

SIDE = 28


class ImageEncoder(nn.Module):
    """Convolutional encoder of images to mean and standard deviation of latents; missing pixels count as zero.

    :param latent_dim: number of latents Q.
    :param condition_dim: number of columns of a condition, which are appended to the features of the image.
    """

    def __init__(self, latent_dim: int, condition_dim: int = 0):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 7 * 7 + condition_dim, 2 * latent_dim)

    def forward(self, y: Tensor, condition: Tensor | None = None) -> tuple[Float[Tensor, "*N Q"], Float[Tensor, "*N Q"]]:
        features = self.features(y.nan_to_num(0.0).reshape(-1, 1, SIDE, SIDE)).unflatten(0, y.shape[:-1])
        loc, raw = self.head(features if condition is None else torch.cat([features, condition], -1)).chunk(2, -1)
        return loc, nn.functional.softplus(raw - 2.0) + 1e-3


class ImageDecoder(nn.Module):
    """Convolutional decoder of latents, or of latents and a condition, to images.

    :param latent_dim: number of columns.
    """

    def __init__(self, latent_dim: int):
        super().__init__()
        self.head = nn.Linear(latent_dim, 16 * 7 * 7)
        self.images = nn.Sequential(
            nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, latents: Float[Tensor, "*N Q"]) -> Float[Tensor, "*N D"]:
        images = self.images(self.head(latents).reshape(-1, 16, 7, 7))
        return images.reshape(*latents.shape[:-1], SIDE**2)


class ImageVAE(nn.Module):
    """Variational autoencoder of images with one noise variance, whose networks are given a condition if there is one.

    :param latent_dim: number of latents Q.
    :param condition_dim: number of columns of the condition; 0 for a VAE without one.
    :param variance: initial noise variance.
    """

    def __init__(self, latent_dim: int, condition_dim: int = 0, *, variance: float):
        super().__init__()
        self.encoder, self.decoder = ImageEncoder(latent_dim, condition_dim), ImageDecoder(latent_dim + condition_dim)
        self.log_variance = nn.Parameter(torch.tensor(math.log(variance)))

    def decode(self, latents: Float[Tensor, "N Q"], condition: Tensor | None) -> Float[Tensor, "N D"]:
        """Means of the pixels."""
        return self.decoder(latents if condition is None else torch.cat([latents, condition], -1))

    def forward(self, y: Float[Tensor, "N D"], condition: Tensor | None) -> Float[Tensor, ""]:
        """Minus the bound on the images, per image, from one draw of the latents."""
        loc, scale = self.encoder(y, condition)
        squares = (y - self.decode(loc + scale * torch.randn_like(loc), condition)).square() / self.log_variance.exp()
        nll = 0.5 * (squares + self.log_variance + math.log(2.0 * math.pi)).sum(-1)
        kl = (0.5 * (loc.square() + scale.square() - 1.0) - scale.log()).sum(-1)
        return (nll + kl).mean()


def train(vae: nn.Module, y: Tensor, condition: Tensor | None, *, num_steps: int, batch_size: int, lr: float) -> None:
    """Train by Adam on random mini-batches, with a learning rate that falls along a cosine.

    :param vae: module that returns the loss of images and a condition.
    """
    optimizer = torch.optim.Adam(vae.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        idx = torch.randperm(len(y))[:batch_size]
        optimizer.zero_grad()
        vae(y[idx], None if condition is None else condition[idx]).backward()
        optimizer.step()
        schedule.step()
