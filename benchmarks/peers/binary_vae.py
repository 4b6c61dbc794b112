"""Variational autoencoder of rows of binary entries, of which some are missing."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class BinaryVAE(nn.Module):
    """Variational autoencoder of binary rows, whose missing entries (NaN) do not count in the bound.

    The attribute ``kl_weight`` multiplies the Kullback-Leibler divergence.

    :param encoder: network that returns mean and standard deviation of the latents.
    :param decoder: network that returns logits.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module):
        super().__init__()
        self.encoder, self.decoder, self.kl_weight = encoder, decoder, 1.0

    def forward(self, y: Float[Tensor, "N D"], condition: None = None) -> Float[Tensor, ""]:
        """Minus the weighted bound on the rows, per row, from one draw of the latents."""
        loc, scale = self.encoder(y)
        logits, observed = self.decoder(loc + scale * torch.randn_like(loc)), ~y.isnan()
        nll = binary_cross_entropy_with_logits(logits, y.nan_to_num(0.0), reduction="none") * observed
        kl = 0.5 * (loc.square() + scale.square() - 1.0) - scale.log()
        return (nll.sum(-1) + self.kl_weight * kl.sum(-1)).mean()
