"""Bounds and ways to climb them."""

from pyro_lvgp.infer.block import Block
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.compiled_elbo import CompiledELBO
from pyro_lvgp.infer.importance_weighted import ImportanceWeightedELBO
from pyro_lvgp.infer.joint_optim import JointOptim
from pyro_lvgp.infer.local_elbo import LocalELBO
from pyro_lvgp.infer.mean_field_elbo import MeanFieldELBO
from pyro_lvgp.infer.sampling import SampledTraces, sample_traces
from pyro_lvgp.infer.structured_elbo import StructuredELBO
from pyro_lvgp.integration import IntegrateGaussians

__all__ = [
    "Block",
    "BlockCoordinateVI",
    "CompiledELBO",
    "ImportanceWeightedELBO",
    "IntegrateGaussians",
    "JointOptim",
    "LocalELBO",
    "MeanFieldELBO",
    "SampledTraces",
    "StructuredELBO",
    "sample_traces",
]
