"""Posterior diagnostics: ArviZ export, importance weights, bounds on the evidence, model selection."""

from pyro_lvgp.diagnostics.arviz import to_arviz
from pyro_lvgp.diagnostics.importance_weights import effective_sample_size, log_weights, pareto_k
from pyro_lvgp.diagnostics.model_selection import (
    gap_folds,
    held_out_log_prob,
    held_out_nll,
    shifted_folds,
    stacking_weights,
)
from pyro_lvgp.diagnostics.sandwich import Sandwich, bound_sandwich

__all__ = [
    "Sandwich",
    "bound_sandwich",
    "effective_sample_size",
    "gap_folds",
    "held_out_log_prob",
    "held_out_nll",
    "log_weights",
    "pareto_k",
    "shifted_folds",
    "stacking_weights",
    "to_arviz",
]
