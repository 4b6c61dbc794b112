"""Posterior diagnostics: ArviZ export, importance weights, leave-one-out, evidence bounds, model selection, calibration."""

from pyro_lvgp.diagnostics.arviz import to_arviz
from pyro_lvgp.diagnostics.calibration import Calibration, calibrate
from pyro_lvgp.diagnostics.chain_gain import ChainGain, chain_gain
from pyro_lvgp.diagnostics.importance_weights import effective_sample_size, log_weights, pareto_k
from pyro_lvgp.diagnostics.leave_one_out import loo
from pyro_lvgp.diagnostics.model_selection import (
    gap_folds,
    held_out_log_prob,
    held_out_nll,
    shifted_folds,
    stacking_weights,
)
from pyro_lvgp.diagnostics.sandwich import Sandwich, bound_sandwich

__all__ = [
    "Calibration",
    "ChainGain",
    "Sandwich",
    "bound_sandwich",
    "calibrate",
    "chain_gain",
    "effective_sample_size",
    "gap_folds",
    "held_out_log_prob",
    "held_out_nll",
    "log_weights",
    "loo",
    "pareto_k",
    "shifted_folds",
    "stacking_weights",
    "to_arviz",
]
