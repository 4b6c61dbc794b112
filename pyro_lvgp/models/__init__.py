"""Latent variable models of rows (plate ``data``), and of series and fields (plates ``series`` and ``points``)."""

from pyro_lvgp.models.gp_vae import GPVAE
from pyro_lvgp.models.gplvm import BayesianGPLVM
from pyro_lvgp.models.initialization import cluster_centres, latent_mixture, linear_latents, tsne_layout
from pyro_lvgp.models.latent_process_model import LatentProcessModel
from pyro_lvgp.models.latent_variable_model import LatentVariableModel
from pyro_lvgp.models.linear_gp_vae import LinearGPVAE
from pyro_lvgp.models.multi_view import MultiViewGPLVM
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.models.random_feature import RandomFeatureLVM
from pyro_lvgp.models.row_arguments import RowArguments
from pyro_lvgp.models.sparse_gp_vae import SparseGPVAE

__all__ = [
    "GPVAE",
    "BayesianGPLVM",
    "LatentProcessModel",
    "LatentVariableModel",
    "LinearGPVAE",
    "MultiViewGPLVM",
    "Prediction",
    "RandomFeatureLVM",
    "RowArguments",
    "SparseGPVAE",
    "cluster_centres",
    "latent_mixture",
    "linear_latents",
    "tsne_layout",
]
