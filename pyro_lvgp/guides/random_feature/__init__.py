"""Guide of the random-feature latent variable model."""

from pyro_lvgp.guides.random_feature.guide import RandomFeatureGuide

__all__ = ["RandomFeatureGuide"]
