"""Encoders and data for tests of updates of Gaussian sites."""

import torch
from torch import nn

N = 30


class Constant(nn.Module):
    """An encoder that ignores the data."""

    def __init__(self, latent_dim, loc=100.0, scale=1e-3):
        super().__init__()
        self.latent_dim = latent_dim
        self.loc, self.scale = nn.Parameter(torch.tensor(loc)), nn.Parameter(torch.tensor(scale))

    def forward(self, y):
        shape = (*y.shape[:-1], self.latent_dim)
        return self.loc.expand(shape), self.scale.expand(shape)


def make_data(model, *series):
    """Draws of the model with gaps: three entries, five entries of an output, and two whole rows."""
    x = torch.linspace(0.0, 1.0, N)[:, None]
    with torch.no_grad():
        y = model(x.expand(*series, N, 1))
    y[..., 3, :3] = y[..., 10:15, 0] = torch.nan
    y[..., 20:22, :] = torch.nan
    return x, y
