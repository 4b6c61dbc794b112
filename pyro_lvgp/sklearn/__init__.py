"""Estimators for scikit-learn."""

from pyro_lvgp.sklearn.gp_vae import GPVAERegressor
from pyro_lvgp.sklearn.gplvm import GPLVM

__all__ = ["GPLVM", "GPVAERegressor"]
