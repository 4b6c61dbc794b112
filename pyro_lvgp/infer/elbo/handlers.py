"""What bounds tell guides, and Gaussian sites integrated in closed form instead of drawn."""

from typing import Any

import torch
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor


class Bounding(Messenger):
    """Tells a guide that it runs for the value of a bound and its gradients, not for draws."""


class Integrating(Bounding):
    """Tells a guide that the bound it runs under will integrate Gaussian sites instead of using their draws."""


def is_bounding() -> bool:
    """Whether a bound runs this guide and says so; Pyro's own say nothing."""
    return any(isinstance(handler, Bounding) for handler in _PYRO_STACK)


def is_integrating() -> bool:
    """Whether a bound that integrates Gaussian sites runs this guide."""
    return any(isinstance(handler, Integrating) for handler in _PYRO_STACK)


class IntegrateGaussians(Messenger):
    """Give the model the moments of Gaussian guide sites where it can integrate over them itself.

    A model offers this by ``pyro.sample(name, prior, infer={"integrated": holder})`` with an empty dict ``holder``.  If the
    guide's site is Gaussian, the sample statement returns its mean, and ``holder["scale_tril"]`` is the Cholesky factor of its
    covariance; the model must then make its likelihood the expectation over the site.  Otherwise the draw stands and the
    holder stays empty.  Traces still record the draw.  Apply it inside ``poutine.replay``, which replaces ``infer``.

    :param guide_trace: trace of the guide, whose other sites must not depend on the integrated ones.
    """

    def __init__(self, guide_trace: Trace):
        super().__init__()
        self._guide_trace = guide_trace
        self._holders: dict[str, dict[str, Tensor]] = {}

    def _pyro_sample(self, msg):
        holder = msg["infer"].get("integrated")
        if holder is not None and msg["name"] in self._guide_trace:
            self._holders[msg["name"]] = holder

    def _pyro_post_sample(self, msg):
        if msg["name"] in self._holders:
            moments = gaussian_moments(self._guide_trace.nodes[msg["name"]]["fn"])
            if moments is not None:
                msg["value"], self._holders[msg["name"]]["scale_tril"] = moments


def gaussian_moments(fn: Any) -> tuple[Tensor, Tensor] | None:
    """Mean and Cholesky factor of the covariance of a Gaussian over vectors."""
    if isinstance(fn, torch.distributions.MultivariateNormal):
        return fn.loc, fn.scale_tril
    base = getattr(fn, "base_dist", None)
    if isinstance(base, torch.distributions.Normal) and len(fn.event_shape) == 1:
        return base.loc, torch.diag_embed(base.scale)
    return None
