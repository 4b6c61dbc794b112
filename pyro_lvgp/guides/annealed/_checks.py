"""Checks of the arguments of annealed guides."""

import math
from typing import Any

from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin, Transition, UnderdampedLangevin
from pyro_lvgp.guides.mean_field import MeanFieldGuide


def check_chain(
    num_steps: int, step_size: float, max_step_size: float, momentum_persistence: float, base_weight: float
) -> None:
    """Raise unless the settings of a chain are in their ranges."""
    check_sizes(num_steps=num_steps)
    if not 0 < step_size < max_step_size:
        raise ValueError(f"expected 0 < step_size < max_step_size, got {step_size} and {max_step_size}")
    if not 0 < momentum_persistence < 1:
        raise ValueError(f"expected momentum_persistence between 0 and 1, got {momentum_persistence}")
    if not 0 <= base_weight < math.inf:
        raise ValueError(f"expected a base_weight of 0 or more, got {base_weight}")


def check_learned_reverse(learn_reverse: bool, transition: Transition) -> None:
    """Raise if reverse kernels are to be learned for a transition that is not one of the Langevin transitions."""
    if learn_reverse and type(transition) not in (OverdampedLangevin, UnderdampedLangevin):
        raise ValueError(
            "expected an OverdampedLangevin or UnderdampedLangevin transition for learn_reverse=True, got "
            f"{type(transition).__name__}; a transition of your own adds the log ratio of its own reverse density"
        )


def check_base_guide(guide: Any) -> None:
    """Raise unless a base guide, if one is given, is a mean-field guide without parameters."""
    if guide is None:
        return
    if not isinstance(guide, MeanFieldGuide):
        raise TypeError(
            f"expected pyro_lvgp.guides.MeanFieldGuide(model, ...) as a base guide, got {type(guide).__name__}; any guide "
            "can be the global_guide"
        )
    if guide.prototype_trace is not None:
        raise ValueError(
            "expected a base guide that has not run, got one that has; pass a new one, and set its locs and scales after the "
            "first call of this guide"
        )


def checked_value(name: str, value: Tensor, loc: Tensor) -> Tensor:
    """Return the unconstrained value of a site; raise unless it has the shape of the base."""
    if value.shape[-loc.dim() :] != loc.shape:
        raise ValueError(
            f"expected a value of site {name!r} of shape {list(loc.shape)} in unconstrained space, got {list(value.shape)}; "
            "with a mini-batch, give the values of its rows"
        )
    return value
