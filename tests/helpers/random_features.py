"""A small random-feature model with its guide, and data with holes."""

import torch

from pyro_lvgp.guides import RandomFeatureGuide
from pyro_lvgp.models import RandomFeatureLVM

N, D, Q, F, C = 12, 3, 2, 4, 3


def with_holes(Y):
    Y = Y.clone()
    Y[torch.rand(Y.shape) < 0.5] = torch.nan
    Y[:, 0] = torch.where(torch.isnan(Y).all(1), torch.ones(len(Y)), Y[:, 0])
    return Y


def make_pair(Y, likelihood=None, latent_dim=Q, **options):
    model = RandomFeatureLVM(len(Y), D, latent_dim, num_frequencies=F, num_components=C, likelihood=likelihood).initialize(Y)
    guide = RandomFeatureGuide(model, **options)
    guide(Y)
    return model, guide


def pin(guide):
    """Take the noise out of latents and frequencies."""
    guide.X.scale = torch.full_like(guide.X.scale, 1e-9)
    guide.omega.scale = torch.full_like(guide.omega.scale, 1e-9)


def features_of(model, guide):
    """At the means of a pinned guide."""
    return model.features(guide.X.loc, guide.omega.loc).detach()
