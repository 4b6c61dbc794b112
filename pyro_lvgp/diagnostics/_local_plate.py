"""Plate over data of a model and its guide."""

from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer.protocols import HasLocalPlate, HasPlates


def find_local_plate(
    model: Any, guide: Any, local_plate: str | None, args: tuple, kwargs: dict, *, seed: int | None
) -> str | None:
    """Return the name of the plate over data: the one given, or else that of the guide or of the model; None without one.

    A model of series has no plate for data of one series.
    """
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        with torch.no_grad(), seeded(seed), poutine.block():
            guide(*args, **kwargs)  # an annealed guide sets its local_plate at the first call
    owners: tuple[Any, ...] = (guide, model)
    name = local_plate or next((owner.local_plate for owner in owners if isinstance(owner, HasLocalPlate)), None)
    if name == local_plate or not isinstance(model, HasPlates):
        return name
    with poutine.block():
        plates = model.create_plates(*args, **kwargs)
    names = {plate.name for plate in ([plates] if isinstance(plates, pyro.plate) else plates)}
    return name if name in names else None
