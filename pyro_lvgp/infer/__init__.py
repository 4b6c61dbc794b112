"""Variational inference: evidence lower bounds, the training loop, optimisers, block coordinate ascent and sampling."""

from pyro_lvgp.infer._fit import FitResult, fit
from pyro_lvgp.infer._sites import SampledSite
from pyro_lvgp.infer.block import Block
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.callbacks import Checkpoint, EarlyStopping
from pyro_lvgp.infer.elbo import (
    CompiledELBO,
    DifferentiableELBO,
    ImportanceWeightedELBO,
    LocalELBO,
    MarginalizeGaussians,
    MeanFieldELBO,
    Moments,
    StructuredELBO,
    sample_moments,
)
from pyro_lvgp.infer.optim import JointOptim
from pyro_lvgp.infer.sampling import SampledTraces, sample_traces

__all__ = [
    "Block",
    "BlockCoordinateVI",
    "Checkpoint",
    "CompiledELBO",
    "DifferentiableELBO",
    "EarlyStopping",
    "FitResult",
    "ImportanceWeightedELBO",
    "JointOptim",
    "LocalELBO",
    "MarginalizeGaussians",
    "MeanFieldELBO",
    "Moments",
    "SampledSite",
    "SampledTraces",
    "StructuredELBO",
    "fit",
    "sample_moments",
    "sample_traces",
]
