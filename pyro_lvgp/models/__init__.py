"""Models: Pyro modules with local latents in plate ``data`` and shared functions."""

from pyro_lvgp.models.gplvm import BayesianGPLVM
from pyro_lvgp.models.latent_variable_model import LatentVariableModel, Prediction

__all__ = ["BayesianGPLVM", "LatentVariableModel", "Prediction"]
