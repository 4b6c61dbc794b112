"""Networks as they predict."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def eval_mode(*parts: Any) -> Iterator[None]:
    """Models and guides in evaluation mode, those that are modules: dropout off, batches normalised by running statistics.

    Afterwards each module is in the mode that it was in.
    """
    modules = {module for part in parts if isinstance(part, nn.Module) for module in part.modules() if module.training}
    for module in modules:  # none by train(), which would change the parts of a part too
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
