"""Posterior diagnostics: ArviZ export, importance weights, leave-one-out, evidence, model selection, calibration, reports."""

from pyro_lvgp.diagnostics.arviz import to_arviz
from pyro_lvgp.diagnostics.calibration import Calibration, calibrate
from pyro_lvgp.diagnostics.chain_gain import ChainGain, chain_gain
from pyro_lvgp.diagnostics.chains import chains_to_arviz
from pyro_lvgp.diagnostics.checks import (
    ChainCheck,
    ConvergenceCheck,
    CoverageCheck,
    EvidenceCheck,
    IntervalCoverage,
    LatentUseCheck,
    LeaveOneOutCheck,
    WeightsCheck,
)
from pyro_lvgp.diagnostics.findings import Check, Finding, NotApplicable
from pyro_lvgp.diagnostics.importance_weights import effective_sample_size, log_weights, pareto_k
from pyro_lvgp.diagnostics.leave_one_out import loo
from pyro_lvgp.diagnostics.model_selection import (
    gap_folds,
    held_out_log_prob,
    held_out_nll,
    shifted_folds,
    stacking_weights,
)
from pyro_lvgp.diagnostics.observed_entries import observed_entries
from pyro_lvgp.diagnostics.report import Report, report
from pyro_lvgp.diagnostics.sandwich import Sandwich, bound_sandwich
from pyro_lvgp.diagnostics.simulation_based_calibration import RankCalibration, SiteRanks, simulation_based_calibration

__all__ = [
    "Calibration",
    "ChainCheck",
    "ChainGain",
    "Check",
    "ConvergenceCheck",
    "CoverageCheck",
    "EvidenceCheck",
    "Finding",
    "IntervalCoverage",
    "LatentUseCheck",
    "LeaveOneOutCheck",
    "NotApplicable",
    "RankCalibration",
    "Report",
    "Sandwich",
    "SiteRanks",
    "WeightsCheck",
    "bound_sandwich",
    "calibrate",
    "chain_gain",
    "chains_to_arviz",
    "effective_sample_size",
    "gap_folds",
    "held_out_log_prob",
    "held_out_nll",
    "log_weights",
    "loo",
    "observed_entries",
    "pareto_k",
    "report",
    "shifted_folds",
    "simulation_based_calibration",
    "stacking_weights",
    "to_arviz",
]
