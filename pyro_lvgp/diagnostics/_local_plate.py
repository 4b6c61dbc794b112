"""Plate over data of a model and its guide."""

from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer.protocols import HasLocalPlate


def find_local_plate(
    model: Any, guide: Any, local_plate: str | None, args: tuple, kwargs: dict, *, seed: int | None
) -> str | None:
    """Return the name of the plate over data: the one given, or else that of the guide or of the model; None without one."""
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        with torch.no_grad(), seeded(seed), poutine.block():
            guide(*args, **kwargs)  # an annealed guide sets its local_plate at the first call
    owners: tuple[Any, ...] = (guide, model)
    return local_plate or next((owner.local_plate for owner in owners if isinstance(owner, HasLocalPlate)), None)
