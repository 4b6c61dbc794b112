"""Annealed importance sampling with Langevin transitions, as a guide."""

from pyro_lvgp.guides.annealed.guide import AutoAnnealedLangevin
from pyro_lvgp.guides.annealed.transitions import State, Transition

__all__ = ["AutoAnnealedLangevin", "State", "Transition"]
