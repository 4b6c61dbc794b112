"""Is the fit any good: ArviZ export."""

from pyro_lvgp.diagnostics.arviz import to_arviz

__all__ = ["to_arviz"]
