"""Pyro's settings and parameters during the methods of an estimator."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import torch

from pyro_lvgp._utils.pyro_lock import pyro_lock


@contextmanager
def own_parameters(module_local_params: bool) -> Iterator[None]:
    """Lock Pyro, in a context with a parameter store of its own, Pyro's setting ``module_local_params``, and gradients.

    :param module_local_params: the setting during the fit of the model.
    """
    setting = pyro.settings.context(module_local_params=module_local_params)
    with pyro_lock, torch.inference_mode(False), torch.enable_grad(), setting, pyro.get_param_store().scope():
        yield
