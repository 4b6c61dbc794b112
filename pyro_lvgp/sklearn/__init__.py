"""Estimators for scikit-learn."""

from pyro_lvgp.sklearn.gp_vae import GPVAERegressor
from pyro_lvgp.sklearn.gp_vae_imputer import GPVAEImputer
from pyro_lvgp.sklearn.gplvm import GPLVM
from pyro_lvgp.sklearn.gplvm_imputer import GPLVMImputer
from pyro_lvgp.sklearn.random_feature_gplvm import RandomFeatureGPLVM

__all__ = ["GPLVM", "GPLVMImputer", "GPVAEImputer", "GPVAERegressor", "RandomFeatureGPLVM"]
