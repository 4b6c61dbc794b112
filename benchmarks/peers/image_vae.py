"""Small convolutional encoder and decoder of images, and a variational autoencoder with them that may be told a condition."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

SIDE = 28


class ImageEncoder(nn.Module):
    """Convolutional encoder of images to mean and standard deviation of latents; missing pixels count as ``centre``.

    :param latent_dim: number of latents Q.
    :param condition_dim: number of columns of a condition, which are appended to the features of the image.
    :param centre: value that is subtracted from the pixels.
    """

    def __init__(self, latent_dim: int, condition_dim: int = 0, *, centre: float = 0.0):
        super().__init__()
        self.centre = centre
        self.features = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 7 * 7 + condition_dim, 2 * latent_dim)

    def forward(self, y: Tensor, condition: Tensor | None = None) -> tuple[Float[Tensor, "*N Q"], Float[Tensor, "*N Q"]]:
        images = (y - self.centre).nan_to_num(0.0).reshape(-1, 1, SIDE, SIDE)
        features = self.features(images).unflatten(0, y.shape[:-1])
        loc, raw = self.head(features if condition is None else torch.cat([features, condition], -1)).chunk(2, -1)
        return loc, nn.functional.softplus(raw - 2.0) + 1e-3


class ImageDecoder(nn.Module):
    """Convolutional decoder of latents, or of latents and a condition, to images.

    :param latent_dim: number of columns.
    :param logits: return logits of the pixels.
    """

    def __init__(self, latent_dim: int, *, logits: bool = False):
        super().__init__()
        self.head = nn.Linear(latent_dim, 16 * 7 * 7)
        self.images = nn.Sequential(
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
            nn.Identity() if logits else nn.Sigmoid(),
        )

    def forward(self, latents: Float[Tensor, "*N Q"]) -> Float[Tensor, "*N D"]:
        images = self.images(self.head(latents).reshape(-1, 16, 7, 7))
        return images.reshape(*latents.shape[:-1], SIDE**2)


class ImageVAE(nn.Module):
    """Variational autoencoder of images, whose networks are given a condition if there is one.

    Missing pixels (NaN) do not count in the bound.

    :param latent_dim: number of latents Q.
    :param condition_dim: number of columns of the condition; 0 for a VAE without one.
    :param variance: initial noise variance of all pixels; None for binary pixels.
    """

    def __init__(self, latent_dim: int, condition_dim: int = 0, *, variance: float | None):
        super().__init__()
        binary = variance is None
        self.encoder = ImageEncoder(latent_dim, condition_dim, centre=0.5 if binary else 0.0)
        self.decoder = ImageDecoder(latent_dim + condition_dim, logits=binary)
        self.log_variance = None if variance is None else nn.Parameter(torch.tensor(math.log(variance)))

    def decode(self, latents: Float[Tensor, "*N Q"], condition: Tensor | None) -> Float[Tensor, "*N D"]:
        """Means of the pixels; logits of binary pixels."""
        return self.decoder(latents if condition is None else torch.cat([latents, condition], -1))

    def forward(self, y: Float[Tensor, "N D"], condition: Tensor | None) -> Float[Tensor, ""]:
        """Minus the bound on the images, per image, from one draw of the latents."""
        loc, scale = self.encoder(y, condition)
        function, value = self.decode(loc + scale * torch.randn_like(loc), condition), y.nan_to_num(0.0)
        if self.log_variance is None:
            terms = nn.functional.binary_cross_entropy_with_logits(function, value, reduction="none")
        else:
            squares = (value - function).square() / self.log_variance.exp()
            terms = 0.5 * (squares + self.log_variance + math.log(2.0 * math.pi))
        kl = (0.5 * (loc.square() + scale.square() - 1.0) - scale.log()).sum(-1)
        return ((terms * ~y.isnan()).sum(-1) + kl).mean()


def train(vae: ImageVAE, y: Tensor, condition: Tensor | None, *, num_steps: int, batch_size: int, lr: float) -> None:
    """Train by Adam on random mini-batches, with a learning rate that falls along a cosine."""
    optimizer = torch.optim.Adam(vae.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        idx = torch.randperm(len(y))[:batch_size]
        optimizer.zero_grad()
        vae(y[idx], None if condition is None else condition[idx]).backward()
        optimizer.step()
        schedule.step()
