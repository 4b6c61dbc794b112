"""Estimators for scikit-learn."""

from pyro_lvgp.sklearn.gp_vae import GPVAERegressor
from pyro_lvgp.sklearn.gp_vae_imputer import GPVAEImputer
from pyro_lvgp.sklearn.gplvm import GPLVM
from pyro_lvgp.sklearn.gplvm_imputer import GPLVMImputer
from pyro_lvgp.sklearn.random_feature_gplvm import RandomFeatureGPLVM
from pyro_lvgp.sklearn.supervised_gplvm import GPLVMClassifier, GPLVMRegressor

__all__ = [
    "GPLVM",
    "GPLVMClassifier",
    "GPLVMImputer",
    "GPLVMRegressor",
    "GPVAEImputer",
    "GPVAERegressor",
    "RandomFeatureGPLVM",
]
