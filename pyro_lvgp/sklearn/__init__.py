"""Estimators for scikit-learn."""

from pyro_lvgp.sklearn.gp_vae import GPVAERegressor
from pyro_lvgp.sklearn.gplvm import GPLVM
from pyro_lvgp.sklearn.gplvm_imputer import GPLVMImputer

__all__ = ["GPLVM", "GPLVMImputer", "GPVAERegressor"]
