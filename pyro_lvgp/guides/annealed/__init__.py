"""Annealed importance sampling with Langevin transitions, as a guide."""

from pyro_lvgp.guides.annealed.guide import AutoAnnealedLangevin

__all__ = ["AutoAnnealedLangevin"]
