"""Checks of the arguments of annealed guides."""

import math
from collections.abc import Sequence
from typing import Any

from pyro.poutine import Trace
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.guides.annealed.transitions import OverdampedLangevin, Transition, UnderdampedLangevin
from pyro_lvgp.guides.mean_field import MeanFieldGuide
from pyro_lvgp.infer.elbo._resampling import Resampling


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


def check_resampling(
    request: Resampling, num_steps: int, local_plate: str | None, annealed: Sequence[str], prototype: Trace
) -> list[int]:
    """Return the dimensions of the plates whose rows have a weight each; raise unless their chains can be resampled.

    :param request: the request of a bound.
    :param num_steps: number of transitions.
    :param local_plate: plate of the annealed sites; None if all sites are annealed jointly.
    :param annealed: names of the annealed sites.
    :param prototype: trace of the model.
    """
    if num_steps == 1:
        raise ValueError("expected num_steps of 2 or more to resample between transitions, got 1; use ImportanceWeightedELBO")
    if local_plate != request.plate:
        raise ValueError(
            f"expected chains of the sites in plate {request.plate!r} to resample, got "
            f"{'joint chains of all sites' if local_plate is None else f'those in plate {local_plate!r}'}; pass the same "
            "local_plate to guide and bound"
        )
    sites = {name: site for name, site in prototype.nodes.items() if site["type"] == "sample"}
    plates = {
        name: frames
        for name, site in sites.items()
        if local_plate in (frames := {frame.name: frame.dim for frame in site["cond_indep_stack"]})
    }
    if others := [name for name in plates if not (sites[name]["is_observed"] or name in annealed)]:
        raise ValueError(
            f"expected all latent sites in plate {local_plate!r} to be annealed, so that chains can be exchanged, got "
            f"{others} drawn otherwise; leave out sites=, or use ImportanceWeightedELBO"
        )
    shared = set.intersection(*(set(frames) for frames in plates.values()))
    if inner := [name for name in annealed if set(plates[name]) != shared]:
        raise ValueError(
            f"expected one draw of each annealed site for each weight, got {inner} in more plates than the other sites of "
            f"plate {local_plate!r}; declare the inner dimension by .to_event(1), or use ImportanceWeightedELBO"
        )
    return sorted(dim for dim in plates[annealed[0]].values() if dim is not None)


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
