"""Data sets of the papers, and generators of synthetic data."""

from pyro_lvgp.datasets._dataset import Dataset
from pyro_lvgp.datasets._fetch import list_datasets, load_dataset
from pyro_lvgp.datasets._generate import bouncing_balls, s_curve, single_cells
from pyro_lvgp.datasets._ghcn import ghcn_daily

__all__ = ["Dataset", "bouncing_balls", "ghcn_daily", "list_datasets", "load_dataset", "s_curve", "single_cells"]
