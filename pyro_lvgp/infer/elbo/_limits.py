"""Check of bounds against the largest log likelihood that the data can have."""

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

from pyro_lvgp._utils.density_limits import log_prob_limit
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer.elbo._terms import trace_guide

__all__ = ["BoundLimit", "is_of_pyro", "needs_check"]

_NATS_OF_CHANCE = 30.0


class _Limit(NamedTuple):
    """Largest possible log likelihood.

    :param value: Σ sup log p(y | f) over the observed sites, in nats.
    :param scale: largest scale of a site, such as that of a mini-batch.
    :param eps: machine epsilon of the data.
    """

    value: float
    scale: float
    eps: float


class BoundLimit:
    """Check that bounds do not exceed the largest log likelihood that the data can have at the present scales.

    The evidence is at most Σ sup_f log p(y | f): 0 for counts, and −½ log 2πσ² for each observed entry under Gaussian noise.
    An estimate p(y, f) / q(f) of the evidence exceeds this limit by t nats with a probability of at most exp(−t).  A bound
    that exceeds it by 30 nats and by rounding is an error of computation.

    The limit is computed, by a run of model and guide, for bounds that exceed zero and the last limit alone, so that most
    steps compare two numbers.  A limit that depends on draws, as under noise with a prior, is no limit, and then bounds are
    not checked.
    """

    def __init__(self) -> None:
        self._parts: tuple[Callable[[], Any], ...] = ()
        self._limit = 0.0

    def __reduce__(self):
        return BoundLimit, ()

    def check(self, loss: float, model: Any, guide: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if minus the loss is impossible.

        :param loss: minus a bound.
        :param model: the model of the bound.
        :param guide: its guide.
        :param args: arguments of both.
        :param kwargs: keyword arguments of both.
        """
        if [part() for part in self._parts] != [model, guide]:
            self._parts, self._limit = (_weak(model), _weak(guide)), 0.0
        if not -loss > self._limit:
            return
        first, second = (_limit(model, guide, args, kwargs, seed) for seed in range(2))
        self._limit = first.value if first.value == second.value else math.inf
        rounding = first.eps**0.5 * (abs(loss) + abs(self._limit))
        if -loss > self._limit + _NATS_OF_CHANCE * first.scale + rounding:
            raise ValueError(
                f"expected a bound of at most {self._limit:g} nats, the largest log likelihood that the data can have at the "
                f"present noise, got {-loss:g}: errors of rounding or quadrature have made the bound meaningless; parameters "
                "are those before this step; standardise the data, and try model and data in torch.float64, a smaller "
                "learning rate, or more quadrature points (num_points) of the likelihood"
            )


def _weak(part: Any) -> Callable[[], Any]:
    """Return a weak reference: the names of the parameters of a deleted guide are free."""
    try:
        return weakref.ref(part)
    except TypeError:  # an object without weak references
        return lambda: part


@torch.no_grad()
def _limit(model: Any, guide: Any, args: tuple, kwargs: Mapping[str, Any], seed: int) -> _Limit:
    """Compute the limit at draws of the guide."""
    with seeded(seed), poutine.block(), eval_mode(model, guide):
        guide_trace = trace_guide(guide, args, kwargs)
        trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(*args, **kwargs)
    value, scale, eps = 0.0, 1.0, 0.0
    for name in trace.observation_nodes:
        site: Any = trace.nodes[name]
        scale = max(scale, float(torch.as_tensor(site["scale"]).max()))
        eps = max(eps, torch.finfo(site["value"].dtype).eps if site["value"].is_floating_point() else 0.0)
        value += float(scale_and_mask(log_prob_limit(site["fn"], site["value"]), site["scale"], site["mask"]).sum())
    return _Limit(value, scale, eps)


def needs_check(loss: Any, model: Any) -> bool:
    """Return whether the loss is a bound of Pyro's of a module.

    A model that is a function may count its calls or read data, so that a fit must not run it more often than it has steps.
    """
    return is_of_pyro(loss) and isinstance(model, nn.Module)


def is_of_pyro(loss: Any) -> bool:
    """Return whether the loss is a bound of Pyro's, which checks neither its values nor masks."""
    return type(loss) in (Trace_ELBO, TraceMeanField_ELBO)
