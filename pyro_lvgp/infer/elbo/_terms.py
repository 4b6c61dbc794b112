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

from pyro_lvgp._utils.control_flow import holds
from pyro_lvgp.infer._row_weights import has_row_weights

__all__ = [
    "Sites",
    "check_in_guide",
    "check_reparameterised",
    "equals",
    "has_one_scale",
    "log_prob_sum",
    "log_ratio",
    "mask_of",
    "share_masks",
    "trace_guide",
]

Sites = Mapping[str, Mapping[str, Any]]


def trace_guide(guide: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Trace:
    """Trace a guide; observed sites of one that runs the model, like an ``AutoNormalMessenger``, are removed."""
    trace = poutine.trace(guide).get_trace(*args, **kwargs)
    if isinstance(poutine.unwrap(guide), GuideMessenger):
        for name in trace.observation_nodes:
            trace.remove_node(name)
    return trace


def check_in_guide(model_sites: Sites, guide_sites: Sites) -> None:
    """Raise if the guide lacks a latent site of the model, whose density would be counted although it is not under q.

    A site with weights of rows in the model alone would count the density of a row more often than that of q.
    """
    lacking = [name for name, site in model_sites.items() if not (site["is_observed"] or name in guide_sites)]
    if lacking:
        raise ValueError(
            f"expected a guide with all latent sites of the model, got none for {lacking}, without which the value is no "
            "bound; add pyro.sample statements of these names to the guide, or observe the sites"
        )
    weighted = [name for name, site in model_sites.items() if name in guide_sites and has_row_weights(site)]
    if unweighted := [name for name in weighted if not has_row_weights(guide_sites[name])]:
        raise ValueError(
            f"expected a guide with the weights of rows of the model, got {unweighted} without, so that the value is no "
            "bound; pass create_plates=model.create_plates to the guide"
        )


def check_reparameterised(guide_sites: Sites) -> None:
    """Raise if a guide site has no reparameterised draws."""
    for name, site in guide_sites.items():
        if not (site["fn"].has_rsample or isinstance(site["fn"], Unit)):
            raise ValueError(
                f"expected guide sites that can be reparameterised, got {name!r} with {type(site['fn']).__name__}; use a "
                "distribution with has_rsample"
            )


def share_masks(model_trace: Trace, guide_trace: Trace) -> None:
    """Give guide sites without a mask the mask of the model's site; otherwise log p − log q has no maximum.

    The density of a site ``x`` of an ``AutoNormal`` is at its site ``x_unconstrained``.
    """
    for name, site in guide_trace.nodes.items():
        if site["type"] == "sample" and site["mask"] is None:
            name = name if name in model_trace else name.removesuffix("_unconstrained")
            if name in model_trace:
                site["mask"] = mask_of(model_trace.nodes[name])


def mask_of(site: Mapping[str, Any]) -> Any:
    """Return the mask of a site, set by a handler or by ``fn.mask(...)``; None without a mask."""
    fn, mask = site["fn"], site["mask"]
    if not isinstance(fn, MaskedDistribution):
        return mask
    return fn._mask if mask is None else mask & fn._mask


def leaves_entries_out(site: Mapping[str, Any]) -> bool:
    """Return whether the mask of a site leaves any of its entries out."""
    mask = mask_of(site)
    return mask is not None and not bool(torch.as_tensor(mask).all())


def log_prob_sum(site: Mapping[str, Any]) -> Tensor:
    """Compute the log density of a site at its value, scaled and masked as by Pyro."""
    return scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]).sum()


def log_ratio(model_sites: Sites, guide_sites: Sites) -> Tensor:
    """Compute Σ log p − Σ log q over sites, with minus the analytic KL divergence of common sites if there is one.

    The KL divergence of a site is conditional on earlier sites, so it is used only if model and guide have their common sites
    in the same order.
    """
    common = [name for name in model_sites if name in guide_sites]
    same_order = common == [name for name in guide_sites if name in model_sites]
    total, with_kl = torch.zeros(()), set()
    for name, site in model_sites.items():
        kl = _kl(guide_sites[name], site) if same_order and name in guide_sites else None
        if kl is None:
            total = total + log_prob_sum(site)
        else:
            total = total - kl
            with_kl.add(name)
    for name, site in guide_sites.items():
        if name not in with_kl:
            total = total - log_prob_sum(site)
    return total


def _kl(guide_site: Mapping[str, Any], model_site: Mapping[str, Any]) -> Tensor | None:
    """Compute the analytic KL divergence of a site; None if there is none."""
    if type(guide_site["fn"]) is Delta:
        return None  # the KL divergence that Pyro registers ignores its log_density
    if not (has_one_scale(guide_site, model_site) and equals(guide_site["mask"], model_site["mask"])):
        return None  # a KL divergence needs one scale and mask
    try:
        kl = kl_divergence(guide_site["fn"], model_site["fn"])
    except NotImplementedError:
        return None
    return scale_and_mask(kl, guide_site["scale"], guide_site["mask"]).sum()


def has_one_scale(site: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sites have the same scale, whose values are compared if both have weights of rows."""
    if has_row_weights(site) and has_row_weights(other):
        return holds(torch.eq(site["scale"], other["scale"]).all())
    return equals(site["scale"], other["scale"])


def equals(weight: Any, other: Any) -> bool:
    """Return whether two scales or masks are equal, without comparing values of tensors, which must be one object."""
    return weight is other or (not torch.is_tensor(weight) and not torch.is_tensor(other) and weight == other)
