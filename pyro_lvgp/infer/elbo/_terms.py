"""Terms of a bound for each site: log densities, analytic KL divergences and masks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from pyro.poutine.guide import GuideMessenger
from torch import Tensor
from torch.distributions import kl_divergence

Sites = Mapping[str, Mapping[str, Any]]


def trace_guide(guide: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace a guide; observed sites of one that runs the model, like an ``AutoNormalMessenger``, are removed."""
    trace = poutine.trace(guide).get_trace(*args, **kwargs)
    if isinstance(poutine.unwrap(guide), GuideMessenger):
        for name in trace.observation_nodes:
            trace.remove_node(name)
    return trace


def check_reparameterised(guide_sites: Sites) -> None:
    """Raise if a draw of the guide cannot be differentiated through."""
    for name, site in guide_sites.items():
        if not (site["fn"].has_rsample or isinstance(site["fn"], Unit)):
            raise ValueError(
                f"expected guide sites that can be reparameterised, got {name!r} with {type(site['fn']).__name__}; use a "
                "distribution with has_rsample"
            )


def share_masks(model_trace: Trace, guide_trace: Trace) -> None:
    """Give guide sites without a mask that of the model's site; otherwise log p − log q has no maximum.

    An ``AutoNormal`` draws ``x`` by a site ``x_unconstrained``, which has the density.
    """
    for name, site in guide_trace.nodes.items():
        if site["type"] == "sample" and site["mask"] is None:
            name = name if name in model_trace else name.removesuffix("_unconstrained")
            if name in model_trace:
                site["mask"] = mask_of(model_trace.nodes[name])


def mask_of(site: Mapping[str, Any]) -> Any:
    """Mask of a site, set by a handler or by ``fn.mask(...)``; None if it has none."""
    fn, mask = site["fn"], site["mask"]
    if not isinstance(fn, MaskedDistribution):
        return mask
    return fn._mask if mask is None else mask & fn._mask


def _log_prob_sum(site: Mapping[str, Any]) -> Tensor:
    """Log density of a site at its value, scaled and masked as Pyro does."""
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]).sum()


def log_ratio(model_sites: Sites, guide_sites: Sites) -> Tensor:
    """Σ log p − Σ log q over sites, with minus the KL of a site in both where it is known.

    A KL conditions on earlier sites, so it is used only if the sites that both have stand in the same order.
    """
    common = [name for name in model_sites if name in guide_sites]
    same_order = common == [name for name in guide_sites if name in model_sites]
    total, done = torch.zeros(()), set()
    for name, site in model_sites.items():
        kl = _kl(guide_sites[name], site) if same_order and name in guide_sites else None
        if kl is None:
            total = total + _log_prob_sum(site)
        else:
            total = total - kl
            done.add(name)
    for name, site in guide_sites.items():
        if name not in done:
            total = total - _log_prob_sum(site)
    return total


def _kl(guide_site: Mapping[str, Any], model_site: Mapping[str, Any]) -> Tensor | None:
    if type(guide_site["fn"]) is Delta:
        return None  # Pyro's KL leaves out its log_density
    if not all(known_same(guide_site[weight], model_site[weight]) for weight in ("scale", "mask")):
        return None  # a KL has one weight for both
    try:
        kl = kl_divergence(guide_site["fn"], model_site["fn"])
    except NotImplementedError:
        return None
    return scale_and_mask(kl, guide_site["scale"], guide_site["mask"]).sum()


def known_same(weight: Any, other: Any) -> bool:
    """Whether two scales or masks are equal; tensors only if they are one object, since their values are not compared."""
    return weight is other or (not torch.is_tensor(weight) and not torch.is_tensor(other) and weight == other)
