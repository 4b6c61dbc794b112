"""Scores of a model's log joint in whitened coordinates, by tracing the model or by its own ``score``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_lvgp.guides._coordinates import SiteCoordinates
from pyro_lvgp.guides.annealed.transitions import Coordinates, State, Transition, check_finite
from pyro_lvgp.infer.elbo.handlers import MarginalizeGaussians
from pyro_lvgp.infer.protocols import HasLogJoint

Bases = tuple[tuple[Tensor, Tensor], ...]  # loc and scale of each site


@dataclass(frozen=True)
class Whitened:
    """Names and coordinates of the annealed sites."""

    sites: tuple[tuple[str, SiteCoordinates], ...]

    def values(self, z: Coordinates, bases: Bases) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the values of the sites at z, and the log determinants of their constraints."""
        values, log_dets = {}, {}
        for (name, site), z_site, base in zip(self.sites, z, bases, strict=True):
            values[name], log_dets[name] = site.constrain(site.from_white(z_site, *base))
        return values, log_dets


def pure_score(
    model: HasLogJoint, sites: Whitened, bases: Bases, statistics: Any, differentiable: bool, z: Coordinates
) -> Coordinates:
    """Compute ∇ log p by the model's ``score``, in operations on tensors alone that can be compiled."""
    values, _ = sites.values(z, bases)
    scores = model.score(values, statistics)
    white = (site.pull_back(scores[name], scale) for (name, site), (_, scale) in zip(sites.sites, bases, strict=True))
    return tuple(white) if differentiable else tuple(score.detach() for score in white)


def pure_transition(
    transition: Transition,
    model: HasLogJoint,
    sites: Whitened,
    shared: tuple[Bases, Any, Tensor, bool],
    state: State,
    schedule: tuple[Tensor, Coordinates],
    noise: Coordinates,
) -> State:
    """Take one transition with :func:`pure_score`, as a step of :class:`~pyro_lvgp.infer._compiled_loop.CompiledLoop`."""
    bases, statistics, momentum_persistence, differentiable = shared
    score = partial(pure_score, model, sites, bases, statistics, differentiable)
    return transition(score, state, noise, *schedule, momentum_persistence)


def read_statistics(model: HasLogJoint, drawn: Trace, marginalize: bool, args: tuple, kwargs: dict) -> Any:
    """Compute the statistics of the model at the drawn sites, or at their moments if the bound marginalises them."""
    statistics: Callable = MarginalizeGaussians(drawn)(model.statistics) if marginalize else model.statistics
    with _hidden_sites():
        return poutine.replay(statistics, drawn)(*args, **kwargs)


def replayable(drawn: Trace) -> Trace:
    """Copy the drawn sites for replay, which skips observed sites: mark conditioned ones as not observed."""
    trace = Trace()
    for name, site in drawn.nodes.items():
        if site["type"] == "sample":
            trace.add_node(name, **{**site, "is_observed": False})
    return trace


@dataclass(frozen=True)
class TracedScore:
    """Score ∇ log p of any Pyro model, by one trace of the model at each evaluation.

    :param model: the model, or a surrogate.
    :param sites: the annealed sites.
    :param bases: loc and scale of the base of each annealed site.
    :param drawn: trace of the guide's sites that are not annealed, and of subsamples.
    :param marginalize: whether the bound marginalises Gaussian sites.
    :param local_plate: name of the plate of local sites; None if all sites are annealed jointly.
    :param differentiable: keep the graph, to differentiate through the score.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    """

    model: Callable
    sites: Whitened
    bases: Bases
    drawn: Trace
    marginalize: bool
    local_plate: str | None
    differentiable: bool
    args: tuple
    kwargs: dict

    def __call__(self, z: Coordinates) -> Coordinates:
        with torch.enable_grad(), _hidden_sites():
            z = tuple(x if self.differentiable and x.requires_grad else x.detach().requires_grad_() for x in z)
            sites, log_dets = self._trace(z)
            terms = [self._log_prob(name, site) for name, site in sites.items()]
            log_p = sum(terms, torch.zeros(())) + sum(x.sum() for x in log_dets.values())
            return torch.autograd.grad(log_p, z, create_graph=self.differentiable)

    def check_plate(self) -> None:
        """Raise if a site outside the local plate depends on a site inside: the scores of the data omit such terms."""
        with torch.enable_grad(), _hidden_sites():
            z = tuple(torch.zeros_like(loc).requires_grad_() for loc, _ in self.bases)
            sites, _ = self._trace(z)
            for name, site in sites.items():
                if site_is_subsample(site) or self.local_plate in (frame.name for frame in site["cond_indep_stack"]):
                    continue
                log_p = site["fn"].log_prob(site["value"]).sum()
                if log_p.requires_grad and any(
                    gradient is not None for gradient in torch.autograd.grad(log_p, z, retain_graph=True, allow_unused=True)
                ):
                    raise ValueError(
                        f"expected all sites that depend on the annealed ones in plate {self.local_plate!r}, got site "
                        f"{name!r} outside of it; put the site inside, or leave out local_plate to anneal all data jointly"
                    )

    def _trace(self, z: Coordinates) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the model's sample sites at state z of the chain, and the log determinants of the constraints."""
        values, log_dets = self.sites.values(z, self.bases)
        model = poutine.condition(self.model, values)
        model = MarginalizeGaussians(self.drawn)(model) if self.marginalize else model
        try:
            trace = poutine.trace(poutine.replay(model, self.drawn)).get_trace(*self.args, **self.kwargs)
        except ValueError:  # such as one for invalid parameters of a distribution, after divergence
            check_finite(z)
            raise
        return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}, log_dets

    def _log_prob(self, name: str, site: Any) -> Tensor:
        """Return the log density of a site, without the scale of a subsampled local plate: each datum has its own chain."""
        if site_is_subsample(site):
            return torch.zeros(())
        if not (site["is_observed"] or name in self.drawn):
            raise ValueError(
                f"expected every latent site to be in the guide, got {name!r}, which is neither annealed nor drawn by the "
                "global guide; chains need the data at every call, for predictions too: Predictive(model, "
                "guide.sample_posterior(num_samples, *args)) uses draws given the data; sum out discrete sites in the model"
            )
        frames = {frame.name: frame for frame in site["cond_indep_stack"]}
        scale = site["scale"]
        if self.local_plate in frames:
            frame = frames[self.local_plate]
            scale = scale * frame.size / (frame.full_size or frame.size)
        elif self.local_plate is not None:
            return torch.zeros(())  # constant in the states of local chains
        for frame in frames.values():
            if frame.name != self.local_plate and frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"expected all rows at annealed sites, got some while plate {frame.name!r}, which their score sums over, "
                    "is subsampled: weights do not account for the noise of such a score; anneal only sites inside that plate "
                    "(local_plate=<its name>), pass a surrogate_model that does not depend on the mini-batch, or use all data"
                )
        return scale_and_mask(site["fn"].log_prob(site["value"]), scale, site["mask"]).sum()


def _hidden_sites() -> Messenger:
    """Return a handler that hides the sites of the model from traces of the guide, but not the parameters."""
    return poutine.block(hide_types=["sample", "observe"])
