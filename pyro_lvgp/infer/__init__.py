"""Variational inference: evidence lower bounds, the training loop, optimisers, block coordinate ascent and sampling."""

from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp.infer._convergence import Gain
from pyro_lvgp.infer._fit import fit
from pyro_lvgp.infer._fit_result import FitResult
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer._sites import SampledSite
from pyro_lvgp.infer.block import Block
from pyro_lvgp.infer.block_coordinate import BlockCoordinateVI
from pyro_lvgp.infer.callbacks import (
    Callback,
    Checkpoint,
    Distributed,
    EarlyStopping,
    LRSchedule,
    ProgressBar,
    StopOnConvergence,
)
from pyro_lvgp.infer.elbo import (
    CompiledELBO,
    DifferentiableELBO,
    ImportanceWeightedELBO,
    LocalELBO,
    MarginalizeGaussians,
    MeanFieldELBO,
    Moments,
    SequentialMonteCarloELBO,
    StructuredELBO,
    sample_moments,
)
from pyro_lvgp.infer.optim import JointAdam, JointOptim, LazyAdam
from pyro_lvgp.infer.restarts import Restart, Restarts, fit_restarts
from pyro_lvgp.infer.row_adam import RowAdam
from pyro_lvgp.infer.sampling import SampledTraces, sample_traces
from pyro_lvgp.infer.saving import Saved, load, save
from pyro_lvgp.infer.sparse_rows import SparseRows

__all__ = [
    "Block",
    "BlockCoordinateVI",
    "Callback",
    "Checkpoint",
    "CompiledELBO",
    "DifferentiableELBO",
    "Distributed",
    "EarlyStopping",
    "FitResult",
    "FitState",
    "Gain",
    "ImportanceWeightedELBO",
    "JointAdam",
    "JointOptim",
    "LRSchedule",
    "LazyAdam",
    "LocalELBO",
    "MarginalizeGaussians",
    "MeanFieldELBO",
    "Moments",
    "ProgressBar",
    "Restart",
    "Restarts",
    "RowAdam",
    "SampledSite",
    "SampledTraces",
    "Saved",
    "SequentialMonteCarloELBO",
    "SparseRows",
    "StopOnConvergence",
    "StructuredELBO",
    "fit",
    "fit_restarts",
    "holds",
    "load",
    "pyro_lock",
    "sample_moments",
    "sample_traces",
    "save",
]
