"""Scores of the model's log joint in whitened coordinates, by tracing or by a pure function."""

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
    """The annealed sites, by name, and their coordinates."""

    sites: tuple[tuple[str, SiteCoordinates], ...]

    def values(self, z: Coordinates, bases: Bases) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Values of the sites at z, and the log determinants of their constraints."""
        values, log_dets = {}, {}
        for (name, site), z_site, base in zip(self.sites, z, bases, strict=True):
            values[name], log_dets[name] = site.constrain(site.from_white(z_site, *base))
        return values, log_dets


def pure_score(
    model: HasLogJoint, sites: Whitened, bases: Bases, statistics: Any, differentiable: bool, z: Coordinates
) -> Coordinates:
    """∇ log p by way of the model's ``score``, without a break for compilers."""
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
    """One transition along the pure score, as a step of :class:`~pyro_lvgp.infer._compiled_loop.CompiledLoop`."""
    bases, statistics, momentum_persistence, differentiable = shared
    score = partial(pure_score, model, sites, bases, statistics, differentiable)
    return transition(score, state, noise, *schedule, momentum_persistence)


def read_statistics(model: HasLogJoint, drawn: Trace, marginalize: bool, args: tuple, kwargs: dict) -> Any:
    """Statistics of the model at the sites drawn, which are marginalised if the bound does so."""
    statistics: Callable = MarginalizeGaussians(drawn)(model.statistics) if marginalize else model.statistics
    with _hidden_sites():
        return poutine.replay(statistics, drawn)(*args, **kwargs)


def replayable(drawn: Trace) -> Trace:
    """The sites drawn, conditioned ones too, for replay."""
    trace = Trace()
    for name, site in drawn.nodes.items():
        if site["type"] == "sample":
            trace.add_node(name, **{**site, "is_observed": False})
    return trace


@dataclass(frozen=True)
class TracedScore:
    """∇ log p by tracing any Pyro model once for each evaluation.

    :param model: the model, or a surrogate.
    :param sites: the annealed sites.
    :param bases: their bases.
    :param drawn: sites of the guide that are not annealed, and subsamples.
    :param marginalize: whether the bound marginalises Gaussian sites.
    :param local_plate: the plate of local sites; None if everything is annealed jointly.
    :param differentiable: keep the graph, to differentiate through the score.
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
        """Raise if a site outside the local plate depends on one inside, which the score of one datum leaves out."""
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
                        f"expected all that depends on the annealed sites to be in plate {self.local_plate!r}, got site "
                        f"{name!r} outside of it: put it inside, or leave out local_plate to anneal all data jointly"
                    )

    def _trace(self, z: Coordinates) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The model's sample sites where the chain is at z, and the log determinants of the constraints there."""
        values, log_dets = self.sites.values(z, self.bases)
        model = poutine.condition(self.model, values)
        model = MarginalizeGaussians(self.drawn)(model) if self.marginalize else model
        try:
            trace = poutine.trace(poutine.replay(model, self.drawn)).get_trace(*self.args, **self.kwargs)
        except ValueError:  # of a distribution without sense, say
            check_finite(z)
            raise
        return {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}, log_dets

    def _log_prob(self, name: str, site: Any) -> Tensor:
        """Log density of a site, but without the scale of a subsampled plate: each datum is in its own chain once."""
        if site_is_subsample(site):
            return torch.zeros(())
        if not (site["is_observed"] or name in self.drawn):
            raise ValueError(
                f"expected every latent site to be in the guide, got {name!r}, which is neither annealed nor drawn by the "
                "global guide; chains need the data at every call, predictions too: Predictive(model, "
                "guide.sample_posterior(num_samples, *args)) takes draws; discrete sites must be enumerated or summed out in "
                "the model"
            )
        frames = {frame.name: frame for frame in site["cond_indep_stack"]}
        scale = site["scale"]
        if self.local_plate in frames:
            frame = frames[self.local_plate]
            scale = scale * frame.size / (frame.full_size or frame.size)
        elif self.local_plate is not None:
            return torch.zeros(())  # the same for every position of a local chain
        for frame in frames.values():
            if frame.name != self.local_plate and frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"sites cannot be annealed while plate {frame.name!r}, which their score sums over, is subsampled: the "
                    "score of a mini-batch is noise that the weight does not account for. Anneal sites inside that plate only "
                    "(local_plate=<its name>), pass a surrogate_model that does not depend on the mini-batch, or use all data"
                )
        return scale_and_mask(site["fn"].log_prob(site["value"]), scale, site["mask"]).sum()


def _hidden_sites() -> Messenger:
    """Handler that hides the sites of the model from traces of the guide, but not its parameters."""
    return poutine.block(hide_types=["sample", "observe"])
