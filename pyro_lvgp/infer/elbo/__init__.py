"""Evidence lower bounds."""

from pyro_lvgp.infer.elbo.base import DifferentiableELBO
from pyro_lvgp.infer.elbo.compiled import CompiledELBO
from pyro_lvgp.infer.elbo.handlers import MarginalizeGaussians, Moments, sample_moments
from pyro_lvgp.infer.elbo.importance_weighted import ImportanceWeightedELBO
from pyro_lvgp.infer.elbo.local_plate import LocalELBO
from pyro_lvgp.infer.elbo.mean_field import MeanFieldELBO
from pyro_lvgp.infer.elbo.sequential_monte_carlo import SequentialMonteCarloELBO
from pyro_lvgp.infer.elbo.structured import StructuredELBO

__all__ = [
    "CompiledELBO",
    "DifferentiableELBO",
    "ImportanceWeightedELBO",
    "LocalELBO",
    "MarginalizeGaussians",
    "MeanFieldELBO",
    "Moments",
    "SequentialMonteCarloELBO",
    "StructuredELBO",
    "sample_moments",
]
