"""Models: Pyro modules with local latents in plate ``data`` and shared functions."""

from pyro_lvgp.models.gplvm import BayesianGPLVM
from pyro_lvgp.models.gpvae import GPVAE
from pyro_lvgp.models.latent_variable_model import LatentVariableModel, Prediction
from pyro_lvgp.models.mixture import MixturePrediction

__all__ = ["GPVAE", "BayesianGPLVM", "LatentVariableModel", "MixturePrediction", "Prediction"]
