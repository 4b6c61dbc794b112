"""Base class of bounds that draw the sites of one plate several times."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine import Trace
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites, site_is_factor
from pyro.util import check_model_guide_match
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._sites import is_deterministic, is_undeclared
from pyro_lvgp.infer.elbo._terms import Sites, check_in_guide, check_reparameterised, share_masks, trace_guide
from pyro_lvgp.infer.elbo.base import DifferentiableELBO
from pyro_lvgp.infer.elbo.handlers import EvaluateBound, MarginalizeGaussians

__all__ = ["LocalELBO"]

SAMPLES = "_local_samples"
_DEFAULT_PLATE = "data"


class _LocalSamples(Messenger):
    """Draw each site of one plate ``num_samples`` times, along a dimension left of every plate."""

    def __init__(self, plate: str, num_samples: int, dim: int):
        super().__init__()
        self._plate = plate
        self._frame = CondIndepStackFrame(SAMPLES, dim, num_samples, 0)

    def _pyro_sample(self, msg):
        if any(frame.name == self._plate for frame in msg["cond_indep_stack"]):
            msg["cond_indep_stack"] = (self._frame, *msg["cond_indep_stack"])
            BroadcastMessenger._pyro_sample(msg)


class LocalELBO(DifferentiableELBO):
    """Base class of bounds that draw the globals once and the sites of one plate S times.

    Sites outside the plate must not depend on draws inside it, in the model or in the guide.

    Subclasses implement :meth:`particle_bound`, from which this class computes ``differentiable_loss``.

    :param local_plate: name of the plate over data.
    :param num_samples: number S of draws of the sites in the plate.
    :param marginalize: marginalise Gaussian globals in closed form where the model can, see
        :func:`~pyro_lvgp.infer.sample_moments`.
    :param num_particles: number of draws of the globals to average over.
    :param max_plate_nesting: as for Pyro's bounds; found by running model and guide once if omitted.
    :raises ValueError: if ``num_samples`` or ``num_particles`` is below 1.
    """

    def __init__(
        self,
        local_plate: str,
        num_samples: int,
        *,
        marginalize: bool,
        num_particles: int,
        max_plate_nesting: int | float,
    ):
        check_sizes(num_samples=num_samples, num_particles=num_particles)
        super().__init__(num_particles=num_particles, max_plate_nesting=max_plate_nesting)
        self.local_plate, self.num_samples, self.marginalize = local_plate, num_samples, marginalize

    @abstractmethod
    def particle_bound(self, model_sites: Sites, guide_sites: Sites) -> Tensor:
        """Estimate the bound at one draw of the globals.

        :param model_sites: sample sites of the model, by name.
        :param guide_sites: sample sites of the guide, by name.
        :returns: a scalar, to differentiate; sites of the plate have a dimension of draws, left of all plates.
        """

    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Compute minus an estimate of the bound, to differentiate."""
        total = torch.zeros(())
        for _ in range(self.num_particles):
            model_sites, guide_sites = self._sample_sites(model, guide, args, kwargs)
            check_reparameterised(guide_sites)
            total = total - self.particle_bound(model_sites, guide_sites)
        return total / self.num_particles

    def _sample_sites(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Sites, Sites]:
        model_trace, guide_trace = self._get_trace(model, guide, args, kwargs)
        model_sites, guide_sites = _sample_sites(model_trace), _sample_sites(guide_trace)
        check_in_guide(model_sites, guide_sites)
        self._check_plate(model_sites)
        return model_sites, guide_sites

    def _get_trace(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        if self.max_plate_nesting == math.inf:
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        samples = _LocalSamples(self.local_plate, self.num_samples, -1 - int(self.max_plate_nesting))
        with EvaluateBound(marginalize=self.marginalize):
            guide_trace = trace_guide(samples(guide), args, kwargs)
        model = MarginalizeGaussians(guide_trace)(model) if self.marginalize else model
        model_trace = poutine.trace(poutine.replay(samples(model), guide_trace)).get_trace(*args, **kwargs)
        share_masks(model_trace, guide_trace)
        pruned = prune_subsample_sites(model_trace), prune_subsample_sites(guide_trace)
        if is_validation_enabled():
            for trace in pruned:
                self._split(_sample_sites(trace))  # first, because its error is more specific
                _check_batch_shapes(_sample_sites(trace))
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting + 1)
        return pruned

    def _check_plate(self, model_sites: Sites) -> None:
        """Raise if a plate is named that is not among those of the model; a model need not have one of the default name."""
        names = {frame.name for site in model_sites.values() for frame in site["cond_indep_stack"]} - {SAMPLES}
        if self.local_plate != _DEFAULT_PLATE and self.local_plate not in names:
            raise ValueError(
                f"expected the name of a plate of the model, one of {sorted(names)}, got local_plate={self.local_plate!r}"
            )

    def _split(self, sites: Sites) -> tuple[Sites, Sites]:
        """Split sites into those inside and outside the local plate; raise if one outside depends on draws inside."""
        local: dict[str, Any] = {}
        outside: dict[str, Any] = {}
        for name, site in sites.items():
            inside = any(frame.name == self.local_plate for frame in site["cond_indep_stack"])
            (local if inside else outside)[name] = site
        for name, site in outside.items():
            shape = site["fn"].batch_shape
            if is_undeclared(shape, {frame.dim for frame in site["cond_indep_stack"]}):
                raise ValueError(
                    f"expected a plate for each batch dimension, got a site without: site {name!r} outside plate "
                    f"{self.local_plate!r} has batch shape {tuple(shape)}, more than its plates declare: a site that depends "
                    "on draws inside the plate must be in the plate or be drawn before it, or there must be one draw, "
                    "num_samples=1 or vectorize=False; other batch dimensions need .to_event(...)"
                )
        return local, outside


def _check_batch_shapes(sites: Mapping[str, Any]) -> None:
    """Raise if a site has a batch dimension without a plate, which would broadcast against the dimension of draws."""
    for name, site in sites.items():
        dims = {frame.dim: frame.name for frame in site["cond_indep_stack"]}
        shapes = [(site["fn"].batch_shape, set(dims))]
        # Data have no dimension of draws; values that are functions of latent sites have one.
        is_function = is_deterministic(site) or site_is_factor(site) or site["value"].requires_grad
        if site["is_observed"] and torch.is_grad_enabled() and not is_function:
            value = site["value"]
            of_data = {dim for dim, plate in dims.items() if plate != SAMPLES}
            shapes.append((value.shape[: value.dim() - site["fn"].event_dim], of_data))
        for shape, declared in shapes:
            if is_undeclared(shape, declared):
                raise ValueError(
                    f"expected a plate for each batch dimension of site {name!r}, got batch shape {tuple(shape)} in plates "
                    f"{sorted(set(dims.values()) - {SAMPLES})}; add pyro.plate(...) or .to_event(...)"
                )


def _sample_sites(trace: Trace) -> Sites:
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
