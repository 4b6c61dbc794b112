"""Looking at posteriors with other tools, and at how good they are."""

from pyro_lvgp.diagnostics.arviz import to_arviz
from pyro_lvgp.diagnostics.weights import Sandwich, bound_sandwich, effective_sample_size, log_weights, pareto_k

__all__ = ["Sandwich", "bound_sandwich", "effective_sample_size", "log_weights", "pareto_k", "to_arviz"]
