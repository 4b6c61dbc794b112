"""Encoders of data with missing entries, decoders, and input corruption."""

from pyro_lvgp.networks.corruption import Masking, hide_entries, hide_like_rows, hide_like_shifted
from pyro_lvgp.networks.encoders import IndexNet, PointNet, ZeroImputation
from pyro_lvgp.networks.factors import FactorNet
from pyro_lvgp.networks.mlp import MLP
from pyro_lvgp.networks.offsets import NeighbourNet, OffsetNet
from pyro_lvgp.networks.pyro_module import as_pyro_module

__all__ = [
    "MLP",
    "FactorNet",
    "IndexNet",
    "Masking",
    "NeighbourNet",
    "OffsetNet",
    "PointNet",
    "ZeroImputation",
    "as_pyro_module",
    "hide_entries",
    "hide_like_rows",
    "hide_like_shifted",
]
