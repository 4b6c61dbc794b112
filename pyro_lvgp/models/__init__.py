"""Models: rows with latents in plate ``data``, and series or fields in plates ``series`` and ``points``."""

from pyro_lvgp.models.gplvm import BayesianGPLVM
from pyro_lvgp.models.gpvae import GPVAE
from pyro_lvgp.models.latent_process_model import LatentProcessModel
from pyro_lvgp.models.latent_variable_model import LatentVariableModel
from pyro_lvgp.models.mixture import Imputation, MixturePrediction
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.models.random_feature import RandomFeatureLVM
from pyro_lvgp.models.sparse_gpvae import SparseGPVAE

__all__ = [
    "GPVAE",
    "BayesianGPLVM",
    "Imputation",
    "LatentProcessModel",
    "LatentVariableModel",
    "MixturePrediction",
    "Prediction",
    "RandomFeatureLVM",
    "SparseGPVAE",
]
