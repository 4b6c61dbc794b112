"""Callbacks of the training loop."""

from pyro_lvgp.infer.callbacks.checkpoint import Checkpoint
from pyro_lvgp.infer.callbacks.early_stopping import EarlyStopping

__all__ = ["Checkpoint", "EarlyStopping"]
