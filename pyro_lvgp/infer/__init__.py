"""Bounds and ways to climb them."""

from pyro_lvgp.infer.importance_weighted import ImportanceWeightedELBO
from pyro_lvgp.infer.joint_optim import JointOptim

__all__ = ["ImportanceWeightedELBO", "JointOptim"]
