"""Evaluation mode of models and guides."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def eval_mode(*parts: Any) -> Iterator[None]:
    """Put models and guides into evaluation mode within the context, and restore the mode of each module afterwards.

    In evaluation mode dropout is off, and batches are normalised by running statistics.

    :param parts: models and guides; functions, which have no mode, are ignored.
    """
    modules = {module for part in parts if isinstance(part, nn.Module) for module in part.modules() if module.training}
    for module in modules:  # train(False) would include submodules that are in evaluation mode already
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
