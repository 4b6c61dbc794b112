"""Guides: variational families for the models of this library and for any Pyro model."""

from pyro_lvgp.guides.annealed import AutoAnnealedLangevin
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.guides.random_feature import RandomFeatureGuide
from pyro_lvgp.guides.sparse_structured import SparseStructuredGPGuide
from pyro_lvgp.guides.structured import StructuredGPGuide

__all__ = ["AutoAnnealedLangevin", "MeanFieldGuide", "RandomFeatureGuide", "SparseStructuredGPGuide", "StructuredGPGuide"]
