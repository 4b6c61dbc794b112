"""Callbacks of the training loop."""

from pyro_lvgp.infer.callbacks.base import Callback
from pyro_lvgp.infer.callbacks.checkpoint import Checkpoint
from pyro_lvgp.infer.callbacks.convergence import StopOnConvergence
from pyro_lvgp.infer.callbacks.distributed import Distributed
from pyro_lvgp.infer.callbacks.early_stopping import EarlyStopping
from pyro_lvgp.infer.callbacks.lr_schedule import LRSchedule
from pyro_lvgp.infer.callbacks.progress_bar import ProgressBar

__all__ = ["Callback", "Checkpoint", "Distributed", "EarlyStopping", "LRSchedule", "ProgressBar", "StopOnConvergence"]
