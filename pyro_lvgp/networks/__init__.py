"""Encoders of data with missing entries, decoders, and input corruption."""

from pyro_lvgp.networks.base import Encoder, loc_and_scale
from pyro_lvgp.networks.corruption import Corruption, mask_entries, mask_like_rows, mask_like_shifted
from pyro_lvgp.networks.encoders import IndexNet, PointNet, ZeroImputation
from pyro_lvgp.networks.factors import FactorNet
from pyro_lvgp.networks.mlp import MLP
from pyro_lvgp.networks.offsets import NeighbourNet, OffsetNet
from pyro_lvgp.networks.pyro_module import as_pyro_module, replace_parameter

__all__ = [
    "MLP",
    "Corruption",
    "Encoder",
    "FactorNet",
    "IndexNet",
    "NeighbourNet",
    "OffsetNet",
    "PointNet",
    "ZeroImputation",
    "as_pyro_module",
    "loc_and_scale",
    "mask_entries",
    "mask_like_rows",
    "mask_like_shifted",
    "replace_parameter",
]
