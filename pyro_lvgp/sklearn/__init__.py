"""Estimators for scikit-learn."""

from pyro_lvgp.sklearn.gplvm import GPLVM

__all__ = ["GPLVM"]
