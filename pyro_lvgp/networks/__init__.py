"""Neural networks: inference networks for data with missing entries.

Encoders map data [*, D], NaN where missing, to loc and scale [*, Q].  A row with nothing observed gets finite numbers too;
guides that multiply a prior by what the encoder says leave such rows out.
"""

from pyro_lvgp.networks.encoders import IndexNet, PointNet, ZeroImputation
from pyro_lvgp.networks.factors import FactorNet
from pyro_lvgp.networks.mlp import MLP, as_pyro_module
from pyro_lvgp.networks.offsets import NeighbourNet, OffsetNet

__all__ = ["MLP", "FactorNet", "IndexNet", "NeighbourNet", "OffsetNet", "PointNet", "ZeroImputation", "as_pyro_module"]
