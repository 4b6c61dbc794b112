"""Variational autoencoder of counts with library sizes and batches, with the published settings of scVI."""

import torch
from jaxtyping import Float
from pyro.distributions import NegativeBinomial
from torch import Tensor, nn


class CountVAE(nn.Module):
    r"""Negative binomial VAE: :math:`y_{nd} \sim NB(l_n\, \mathrm{softmax}(g(z_n, b_n))_d, r_d)`.

    Encoder and decoder have one hidden layer with batch normalisation; the encoder sees log(1 + y), with zeros for hidden
    entries.

    :param data_dim: number of genes D.
    :param num_batches: number of batches.
    :param latent_dim: number of latents; 10 in scVI.
    :param hidden: width of the hidden layers; 128 in scVI.

    Source: Lopez et al. (2018), "Deep generative modeling for single-cell transcriptomics"; Gayoso et al. (2022), "A Python
    library for probabilistic analysis of single-cell omics data", for the settings.
    """

    def __init__(self, data_dim: int, num_batches: int, *, latent_dim: int = 10, hidden: int = 128):
        super().__init__()
        self.encoder = nn.Sequential(*_layer(data_dim, hidden), nn.Dropout(0.1), nn.Linear(hidden, 2 * latent_dim))
        self.decoder = nn.Sequential(*_layer(latent_dim + num_batches, hidden), nn.Linear(hidden, data_dim))
        self.log_dispersion = nn.Parameter(torch.randn(data_dim))

    def encode(self, Y: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B Q"], Float[Tensor, "B Q"]]:
        """Means and standard deviations of the latents."""
        mean, log_variance = self.encoder(Y.nan_to_num().log1p()).chunk(2, -1)
        return mean, (0.5 * log_variance).exp() + 1e-2

    def counts(self, z: Float[Tensor, "B Q"], library: Float[Tensor, "B 1"], batch: Float[Tensor, "B K"]) -> NegativeBinomial:
        """Distribution of the counts given latents."""
        log_mean = library.log() + self.decoder(torch.cat([z, batch], -1)).log_softmax(-1)
        return NegativeBinomial(self.log_dispersion.exp(), logits=log_mean - self.log_dispersion, validate_args=False)

    def forward(self, Y: Tensor, library: Tensor, batch: Tensor, kl_weight: float) -> Float[Tensor, ""]:
        """Minus the bound on the observed entries, per row, from one draw of the latents."""
        mean, stddev = self.encode(Y)
        z = mean + stddev * torch.randn_like(mean)
        log_prob = self.counts(z, library, batch).log_prob(Y.nan_to_num()).masked_fill(Y.isnan(), 0.0)
        kl = (0.5 * (mean.square() + stddev.square() - 1.0) - stddev.log()).sum(-1)
        return (kl_weight * kl - log_prob.sum(-1)).mean()


def _layer(in_dim: int, out_dim: int) -> tuple[nn.Module, ...]:
    return nn.Linear(in_dim, out_dim), nn.BatchNorm1d(out_dim, eps=1e-3, momentum=0.01), nn.ReLU()


def fit_count_vae(
    Y: Float[Tensor, "N D"], library: Float[Tensor, "N 1"], batch: Float[Tensor, "N K"], *, num_epochs: int = 400
) -> CountVAE:
    """Train by Adam with a learning rate of 10⁻³ on mini-batches of 128 rows, the weight of the KL divergence rising to 1.

    :param Y: counts, NaN where hidden.
    :param library: library sizes.
    :param batch: indicators of batches.
    :param num_epochs: number of epochs, over which the weight rises; 400 in scVI for fewer than 20 000 cells.
    """
    model = CountVAE(Y.shape[1], batch.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.01, weight_decay=1e-6)
    for epoch in range(num_epochs):
        for idx in torch.randperm(len(Y)).split(128):
            optimizer.zero_grad()
            model(Y[idx], library[idx], batch[idx], (epoch + 1) / num_epochs).backward()
            optimizer.step()
    return model.eval()
